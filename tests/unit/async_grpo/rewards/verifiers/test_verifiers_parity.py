"""The verdicts of the trainers whose names our verifiers bear, written out: what their own code returned."""

from __future__ import annotations

import pytest

from async_grpo.rewards.registry import BUILTIN
from async_grpo.rewards.verifiers.logic import kk_reward
from async_grpo.rewards.verifiers.prm800k import are_equal_answers, math_17k_acc, parse_expression
from async_grpo.rewards.verifiers.symbolic import math_verify_reward
from async_grpo.rewards.verifiers.text import retool_reward

GRADES = [
    # (answer in the box, reference, verdict of grade_answer in mathruler 0.1.0, which MindSpeed-RL calls)
    ("18", "18", True),
    ("18.0", "18", True),
    ("18.", "18", True),
    ("018", "18", True),
    ("+18", "18", True),
    ("-18", "18", False),
    ("17.99999", "18", False),
    ("1,800", "1800", True),
    (r"1,\!800", "1800", True),
    ("1{,}800", "1800", True),
    (r"\$18", "18", True),
    (r"18\%", "18", True),
    ("18 cm", "18", True),
    (r"18\text{ cm}^2", "18", True),
    (r"18^\circ", "18", True),
    ("18 dollars", "18", False),
    ("x = 18", "18", True),
    ("36/2", "18", False),
    (r"\frac{36}{2}", "18", False),
    ("120", "5!", False),
    ("2 million", "2*10^6", True),
    ("2 million", "2000000", False),
    ("1/2", r"\frac{1}{2}", True),
    (r"\frac12", r"\frac{1}{2}", True),
    (r"\dfrac{1}{2}", "1/2", True),
    ("0.50", r"\frac{1}{2}", True),
    ("2/4", "1/2", False),
    (r"\frac{2}{4}", r"\frac{1}{2}", False),
    (r"7\frac{3}{4}", "31/4", True),
    (r"7\frac{3}{4}", "7 3/4", True),
    (r"\sqrt{12}", r"2\sqrt{3}", True),
    (r"\frac{\sqrt{3}}{2}", "sqrt(3)/2", True),
    (r"\frac{\pi}{6}", r"\pi/6", True),
    ("2x", "x*2", True),
    ("(x+y)(x-y)", "x^2-y^2", True),
    ("abc+1", "1+abc", False),
    ("x^{10}", "x^10", True),
    (r"\left(1,2\right)", "(1, 2)", True),
    (r"(0.5,3)", r"(\frac{1}{2},3)", True),
    ("(2,1)", "(1,2)", False),
    ("[1,2)", "(1,2)", False),
    ("1, 2", "2, 1", False),
    ("3 and 4", "3, 4", True),
    (r"\{1,2\}", "1,2", True),
    (r"(-\infty,5)", "(-inf,5)", True),
    (r"\text{Even}", "even", True),
    (r"x\le5", "x≤5", True),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}", True),
    ("", "18", False),
    (r"\frac", "18", False),
    ("__import__('os')", "18", False),
]


@pytest.mark.parametrize(("given", "answer", "verdict"), GRADES)
def test_answers_are_graded_like_mathruler(given: str, answer: str, verdict: bool) -> None:
    assert are_equal_answers(given, answer) == verdict
    assert math_17k_acc(rf"so \boxed{{{given}}}.", answer) == float(verdict)


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (r"\boxed{17} \boxed{18}", 1.0),
        (r"\boxed{\boxed{18}}", 1.0),
        (r"\boxed{18} \boxed{17", 0.0),
        (r"\boxed {18}", 0.0),
        ("18", 0.0),
    ],
)
def test_only_the_last_box_counts_and_only_if_closed(completion: str, score: float) -> None:
    assert math_17k_acc(completion, "18") == score


def test_acc_for_ppo_is_math_17k_acc() -> None:
    assert BUILTIN["acc_for_ppo"] == BUILTIN["math_17k_acc"]


@pytest.mark.parametrize("text", ["S('1')", "x.real", "lambda: 1", "[x for x in y]", "eye(2)", "9 if x else y"])
def test_completions_are_never_executed(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        parse_expression(text)


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        # MindSpeed-RL at 05a90d7: rule_verifier.math_verify_reward
        (r"<think>a</think><answer>\boxed{18}</answer>", "18", 1.0),
        (r"<think>a</think> so, <answer>it is $\boxed{36/2}$.</answer>", "18", 1.0),
        (r"<think><answer>17</answer></think><answer>\boxed{18}</answer>", r"\$18", 1.0),
        (r"<think>a</think><answer>\boxed{18} The final answer is $7$.</answer>", "18", 0.0),
        (r"<think>a</think><answer>\boxed{18} The final answer is $7$.</answer>", "7", 1.0),
        (r"<think>a</think><answer>\boxed{18}</answer>", "$18$,1", 0.0),
        ("<think>a</think><answer>18</answer>", "18", 0.0),
        (r"<think>a</think><answer>\boxed{18}</answer>!", "18", 0.0),
        (r" <think>a</think><answer>\boxed{18}</answer>", "18", 0.0),
        (r"\boxed{18}", "18", 0.0),
    ],
)
def test_math_verify_reward_requires_a_box_in_the_answer(completion: str, answer: str, score: float) -> None:
    assert math_verify_reward(completion, answer) == score


@pytest.mark.parametrize(
    ("completion", "tool_calls", "score"),
    [
        # MindSpeed-RL at 05a90d7: rule_verifier.retool_reward
        (r"\boxed{18}", 0, 1.0),
        (r"\boxed{18}" + "." * 90, 3, 1.0),
        (r"\boxed{18}" + "." * 91, 0, -1.0),
        (r"\boxed{18}" + "." * 91, 3, -0.7),
        (r"\boxed{ 18}", 0, -1.0),
        (r"\boxed{18.0}", 0, -1.0),
        (r"\boxed{18} \boxed{17", 1, -0.9),
        ("18", 12, 0.0),
    ],
)
def test_retool_reward_compares_exactly_and_adds_a_tool_call_bonus(
    completion: str, tool_calls: int, score: float
) -> None:
    assert retool_reward(completion, "18", tool_calls=tool_calls) == pytest.approx(score)


TWO = "Zoe is a knight\nJacob is a knave"
THOUGHT = "Assistant: <think>t</think>"


@pytest.mark.parametrize(
    ("prompt", "completion", "score"),
    [
        # MindRLHF at e8a8fc1: kk_reward_fn.kk_reward
        ("Who? ", f"{THOUGHT}<answer>Zoe is a knight.\nJacob is a knave</answer>", 3.0),
        ("Who? ", f"{THOUGHT}<answer>jacob  is a KNAVE, zoe is a knight</answer>", 3.0),
        ("Who? Assistant: <think>", "t</think><answer>Zoe is a knight. Jacob is a knave</answer>", 3.0),
        ("<|im_start|>assistant\n", "<think></think><answer>Zoe is a knight. Jacob is a knave</answer>", 3.0),
        ("Who? ", f"{THOUGHT}<answer>Zoe is a knave. Jacob is a knight</answer>", -0.5),
        ("Who? ", f"{THOUGHT}<answer>Zoe: knight, Jacob: knave</answer>", -1.0),
        ("Who? ", f"{THOUGHT}<answer>Zoe is a knight</answer>", -1.0),
        ("Who? ", f"{THOUGHT}<answer>Zoe is a knight. Jacob is a knave. Ann is a knave</answer>", -1.0),
        ("Who? ", f"{THOUGHT}<answer></answer>", -1.0),
        ("Who? ", "<think>t</think><answer>Zoe is a knight. Jacob is a knave</answer>", -1.0),
        ("Who? ", "Assistant: <answer>Zoe is a knight. Jacob is a knave</answer>", -3.0),
        ("Who? ", f"{THOUGHT}<answer>Zoe is a knight. Jacob is a knave</answer><answer>1</answer>", -3.0),
    ],
)
def test_kk_reward_adds_format_and_answer(prompt: str, completion: str, score: float) -> None:
    assert kk_reward(completion, TWO, prompt=prompt) == score


def test_kk_reward_rejects_a_reference_without_roles() -> None:
    with pytest.raises(ValueError, match="no knight"):
        kk_reward(THOUGHT, "18")
