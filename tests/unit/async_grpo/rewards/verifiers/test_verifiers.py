"""What each rule scores, what it refuses to score, and that no text makes it fail."""

from __future__ import annotations

import re
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.rewards.base import RewardInput
from async_grpo.rewards.registry import ALGEBRA_VERIFIERS, BUILTIN, load_verifier
from async_grpo.rewards.verifiers import boxed
from async_grpo.rewards.verifiers.answers import answer_tag, format_tags, gsm8k
from async_grpo.rewards.verifiers.symbolic import are_equal_expressions, math_verify
from async_grpo.rewards.verifiers.text import acc_for_dapo, accuracy_reward, qwen_accuracy_reward

BOXED = r"<think>3+15</think><answer>\boxed{18}</answer>"
KNIGHT = "Zoe is a knight"
FIRST, FRACTION = "First, 3 + 15. Answer: 18", r"so \boxed{\frac{36}{2}}"
ANSWERS = [(BOXED, "18"), (BOXED, "19"), (FIRST, "18"), (FRACTION, "18"), ("", "18")]
SCORES = {
    # verifier: the scores of ANSWERS
    "accuracy_reward": (1, 0, 1, 0, 0),
    "qwen_accuracy_reward": (1, 0, 0, 0, 0),
    "format_reward": (1, 1, 0, 0, 0),
    "format": (1, 1, 0, 0, 0),
    "acc": (1, -0.5, -1, 1, -1),
    "strict_format": (1, 1, -0.5, -0.5, -0.5),
    "step": (0, 0, 1 / 3, 0, 0),
    "base_acc": (1, 0, 0, 0, 0),
    "math_17k_acc": (1, 0, 0, 0, 0),  # where the reference is a whole number, the answer must be one
    "acc_for_ppo": (1, 0, 0, 0, 0),
    "acc_for_dapo": (-1, -1, 1, -1, -1),
    "retool_reward": (1, -1, -1, -1, -1),
    "math_verify": (1, 0, 1, 1, 0),
    "math_verify_reward": (1, 0, 0, 0, 0),
    "gsm8k": (1, 0, 1, 1, 0),
    "answer_tag": (0, 0, 0, 0, 0),
}
PAIRS = {
    # (verifier, score): completions and their references
    ("gsm8k", 1.0): [
        ("it is 1,800", "1800"),
        ("it is 1800", "1,800"),
        ("#### 1,234,567.50", "1234567.5"),
        ("the debt is -$18", "-18"),
        ("the debt is $-18", "-18"),
        ("so 20 - 2 = 18.", "18"),
        ("20-2=18", "18"),
        (r"\boxed{18\text{ eggs}}", "18"),
        (r"\boxed{\frac{36}{2}}", "18"),
        (r"\boxed{-\dfrac{36}{2}}", "-18"),
        (r"#### $7\frac{3}{4}$", "7.75"),
        (r"so $x = \frac{5}{2}$", "5/2"),
        (r"\boxed{70{,}000}", "70000"),
        (r"\boxed{70,\!000}", "70,000"),
        (r"it is \$1\,234{,}567.", "1234567"),
        (r"\boxed{x = 18}", "18"),
        (r"\boxed{1} no, \boxed{18}", "18"),
        ("#### 18\nBut there are 3 more lines", "18"),
        ("<answer>3 + 15 = 18</answer>", "18"),
        ("a half, .5", "1/2"),
        ("18", "He has 3 * 6 = 18 #### 18"),
    ],
    ("gsm8k", 0.0): [
        ("", "18"),
        ("no number here", "18"),
        ("18 at first, then 19", "18"),
        ("18.5", "18"),
        ("-18", "18"),
        (r"18 \boxed{19}", "18"),
        (r"\boxed{19} #### 18", "18"),
        (r"\boxed{} and 18", "18"),
        ("#### 17 18", "18"),
        ("<answer>18 or 19</answer>", "18"),
        ("18/0", "18"),
        (r"\boxed{\frac{18}{0}}", "18"),
        (r"so it is \frac{5}{2}", "2"),
        (r"3{,}5 or 18{,}00", "1800"),
        ("9" * 10_000, "18"),
    ],
    ("math_verify", 1.0): [
        (r"so it is \boxed{\frac{1}{2}}", "0.5"),
        (r"so it is $0.5$", r"\frac{1}{2}"),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
        (r"\boxed{(x+1)^2}", "x^2+2x+1"),
        (r"\boxed{1800}", "1,800"),
        (r"\boxed{18}", "He has 3 * 6 = 18 #### 18"),
        (r"either \boxed{1} or \boxed{2}", r"\{1, 2\}"),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}"),
        (r"\boxed{[0, 1)}", "[0, 1)"),
        (r"\boxed{x = 5}", "5"),
        ("18", r"\boxed{18}"),
        (r"\boxed{18}", r"\$18"),
        ("it is $1,800.", r"\$1,800"),
        (r"\boxed{18}", "$18$"),
        ("The final answer is: $5$. I hope it is correct. \\boxed{6}", "5"),
        (r"\boxed{6} The final answer is 5.", "5"),  # the later of the two
        (r"The final answer is $5$. So \boxed{6}", "6"),
    ],
    ("math_verify", 0.0): [
        (r"\boxed{3}", r"3\sqrt{2}"),  # a bare reference would be read as 3
        (r"\boxed{19}", "18"),
        (r"\boxed{1}, no, \boxed{2}", "2"),  # the package takes this for the set {1, 2}
        (r"\boxed{[0, 1]}", "[0, 1)"),
        ("no expression at all", "18"),
        ("", "18"),
    ],
    ("acc_for_dapo", 1.0): [
        ("Answer: 18", "18"),
        ("answer :\n18", "18"),
        ("Answer: 17\nAnswer: 18", "18"),
        ("Answer: $18$.", "18"),
        ("Answer: x = 18 dollars", "18"),
        ("Answer: 1,800", "1800"),
        (r"Answer: \boxed{18}", "18"),
        (r"Answer: $\frac12$", r"\frac{1}{2}"),
        ("x" * 1000 + "Answer: 18", "18"),
    ],
    ("acc_for_dapo", -1.0): [
        ("18", "18"),
        ("Answer: 18" + " " * 300, "18"),
        ("Answer: 18\nAnswer: 19", "18"),
        ("Answer:", "18"),
    ],
}
GRADES = {
    # (verifier, reference): completions and their scores
    ("answer_tag", " 834"): [
        ("<answer>834</answer>", 1.0),
        ("<answer>\n 834 </answer>", 1.0),
        ("<answer>1</answer> no: <answer>834</answer>", 1.0),
        ("<answer><answer>834</answer>", 1.0),
        ("<answer>834</answer> <answer>1", 1.0),
        ("<answer>834</answer> <answer>1</answer>", 0.0),
        ("<answer>0834</answer>", 0.0),
        ("834", 0.0),
        ("<answer>834", 0.0),
        ("", 0.0),
    ],
    ("format", "whatever"): [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("<think>a\nb</think>\n\n<answer>b\nc</answer>", 1.0),
        ("<think></think><answer></answer>", 1.0),
        (" <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer>!", 0.0),
        ("<answer>b</answer>", 0.0),
    ],
    ("qwen_accuracy_reward", "18"): [
        ("boxed{18}", 1.0),
        (r"\boxed{18} 19", 1.0),
        (r"\boxed{1} \boxed{18}", 1.0),
        (r"\boxed{18} \boxed{eggs}", 1.0),
        (r"\boxed{18.}", 0.0),
        (r"\boxed{ 18}", 0.0),
        (r"\boxed{18", 0.0),
        ("18", 1.0),  # no number in a box: the whole text is compared
        ("18 ", 0.0),
    ],
    ("acc", "18"): [
        (r"\boxed{18}", 1.0),
        (r"\boxed{17} \boxed{18}", 1.0),
        (r"\boxed{18} \boxed{17}", -0.5),
        (r"$\boxed 18$", 1.0),
        (r"\boxed{18", 1.0),
        (r"\boxed{}", -1.0),
        ("boxed", -1.0),
        ("#### 18", -1.0),
    ],
    ("strict_format", ""): [
        (r"<think>a</think> <answer>so \boxed{1}</answer>", 1.0),
        (r"<think>a</think><answer>\boxed{1} \boxed{2}</answer>", -0.5),
        (r"<think>\boxed{1}</think><answer>1</answer>", -0.5),
        (r"<think>a</think><answer>\boxed{1}</answer> ", -0.5),
        (r"<think>a<think></think><answer>\boxed{1}</answer>", -0.5),
        ("<think>a</think><answer>\\boxed{\n1}</answer>", -0.5),
    ],
}
ACCURACY = [
    ("it is 1,800", "1,800", 1.0),
    ("3 then 18", "18 of 20", 1.0),  # the last of the completion, the first of the reference
    ("18.", "18", 0.0),
    ("18.0", "18", 0.0),
    ("-18", "18", 0.0),
    ("+18", "18", 0.0),
    ("YES", "yes", 1.0),
    ("yes!", "yes", 0.0),
    ("1,2,3", "12", 0.0),  # a digit belongs to one comma only: "12,3", whose last number is 3
    ("1,2,3", "3", 1.0),
]
CASES = [
    *((name, *pair, score) for (name, score), pairs in PAIRS.items() for pair in pairs),
    *((name, text, answer, score) for (name, answer), grades in GRADES.items() for text, score in grades),
    *(("accuracy_reward", *case) for case in ACCURACY),
    *((name, *case, score) for name, scores in SCORES.items() for case, score in zip(ANSWERS, scores, strict=True)),
    ("kk_reward", "", KNIGHT, -3.0),
]


@pytest.mark.parametrize(("name", "completion", "answer", "score"), CASES)
def test_verifiers_score_completions(name: str, completion: str, answer: str, score: float) -> None:
    assert load_verifier(name)[0](RewardInput(completion, answer)) == pytest.approx(score)


def test_every_verifier_is_registered() -> None:
    assert {*SCORES, "kk_reward"} == set(BUILTIN)


@pytest.mark.parametrize("completion", ["18", "18.", "18.00", "$18", "$ 18", r"\$18", "18%", "+18", "36/2", "18 eggs"])
def test_gsm8k_accepts_every_spelling_of_a_number(completion: str) -> None:
    assert gsm8k(f"#### {completion}", "18") == 1.0


@pytest.mark.parametrize(
    ("name", "completion", "answer", "message"),
    [
        ("gsm8k", "18", "a dozen", "not a number"),
        ("math_verify", "18", "", "mathematical expression"),
        ("math_verify", "18", "solution ####", "mathematical expression"),
        ("acc_for_dapo", "Answer: 18", "1" * 5000, "5000 characters"),
    ],
)
def test_an_invalid_reference_is_an_error(name: str, completion: str, answer: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_verifier(name)[0](RewardInput(completion, answer))


def test_math_verify_works_outside_the_main_thread() -> None:
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(math_verify(r"\boxed{18}", "18")))
    thread.start()
    thread.join()
    assert scores == [1.0]


@pytest.mark.parametrize(
    ("given", "answer", "same"),
    [
        ("1,800", "1800", True),
        ("+18", "18", True),
        ("018", "18", True),
        ("-18", "18", False),
        ("18.0", "18", True),
        ("36/2", "18", True),
        ("1 800", "1800", True),
        ("Even", "even", True),
        ("20001", "20000", False),
        ("1800", "18", False),
        ("0.5", "\\frac12", True),
        ("18", "3 * 6 = 18 #### 18", True),
    ],
)
def test_answers_are_equal_as_text_as_integers_or_symbolically(given: str, answer: str, same: bool) -> None:
    assert are_equal_expressions(given, answer) == same


@pytest.mark.parametrize(
    ("completion", "markers"),
    [("Step 1: a\nStep 2: b", 2), ("1. a\n2. b", 1), ("a\n- b\n* c", 2), ("- a", 0), ("First, a. first, b", 1)],
)
def test_step_counts_markers_up_to_three(completion: str, markers: int) -> None:
    assert boxed.step(completion, "") == markers / 3
    assert boxed.step(completion + "\n-\n-\n-", "") == 1.0


tag_soup = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<answer>", "</answer>", "\\boxed{", "boxed{", "{", "}", "1", ".", "-", "\n", " "]
    ),
    max_size=14,
).map("".join)


@settings(max_examples=500, deadline=None)
@given(tag_soup)
def test_search_rules_agree_with_their_regular_expressions(text: str) -> None:
    loose = re.match(r"^<think>.*?</think>\s*<answer>.*?</answer>$", text, re.DOTALL | re.MULTILINE)
    assert format_tags(text, "") == float(loose is not None)
    whole = re.fullmatch(r"<think>.*</think>.*<answer>.*\\boxed\{.*\}.*</answer>", text, re.DOTALL)
    assert boxed.has_boxed_answer_format(text) == (whole is not None)
    closed = [match.start() for match in re.finditer(r"\\boxed\{.*?\}", text)]
    assert boxed.find_one_line_boxes(text, limit=100) == closed
    numbers = re.findall(r"boxed{([-+]?\d*\.?\d+)}", text)
    assert qwen_accuracy_reward(text, "1") == float((numbers[-1] if numbers else text) == "1")
    assert boxed.find_last_closed_box(text) == find_last_closed_box_slowly(text)


def find_last_closed_box_slowly(text: str) -> str | None:
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for position in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start:position]
    return None


NO_ALGEBRA = sorted(BUILTIN.keys() - ALGEBRA_VERIFIERS)
REFERENCES = {"kk_reward": KNIGHT}
RANGES = {
    "strict_format": (-0.5, 1.0),
    "acc_for_dapo": (-1.0, 1.0),
    "retool_reward": (-1.0, 1.0),
    "kk_reward": (-3.0, 3.0),
}


@pytest.mark.parametrize("name", NO_ALGEBRA)
@settings(max_examples=80, deadline=None)
@given(completion=st.one_of(st.text(), tag_soup, st.text(alphabet="0123456789.,-+$/\\{}boxedAnswer: #=\n²٣")))
def test_format_rules_accept_any_text(name: str, completion: str) -> None:
    low, high = RANGES.get(name, (0.0, 1.0))
    assert low <= load_verifier(name)[0](RewardInput(completion, REFERENCES.get(name, "18"))) <= high


@settings(max_examples=200, deadline=None)
@given(reference=st.text(max_size=300))
def test_text_verifiers_accept_any_reference(reference: str) -> None:
    for verifier in (accuracy_reward, qwen_accuracy_reward, acc_for_dapo, answer_tag):
        assert verifier("<answer>18</answer>", reference) in (-1.0, 0.0, 1.0)


@settings(max_examples=200, deadline=None)
@given(value=st.integers(-(10**12), 10**12), other=st.integers(-(10**12), 10**12))
def test_gsm8k_distinguishes_any_two_integers(value: int, other: int) -> None:
    assert gsm8k(f"so it is {value:,}.", str(value)) == 1.0
    assert gsm8k(f"so it is {value:,}.", str(other)) == float(value == other)


def test_acc_returns_none_if_the_comparison_takes_too_long() -> None:
    assert load_verifier("acc")[0](RewardInput(r"\boxed{9^{9^{9^{9}}}}", "18")) is None
    with pytest.raises(ValueError, match="mathematical expression"):
        load_verifier("acc")[0](RewardInput(r"\boxed{18}", ""))


@pytest.mark.parametrize("name", ["math_17k_acc", "acc", "math_verify", "gsm8k"])
@pytest.mark.parametrize("number", [2**53, 12345678901234567890, -(10**30)])
def test_large_integers_are_compared_exactly(name: str, number: int) -> None:
    verifier = load_verifier(name)[0]
    assert verifier(RewardInput(rf"\boxed{{{number}}}", str(number))) == 1.0
    for other in (number + 1, number - 1):
        assert verifier(RewardInput(rf"\boxed{{{other}}}", str(number))) in (0.0, -0.5)


def test_a_large_decimal_is_not_an_integer() -> None:
    assert (
        load_verifier("math_17k_acc")[0](RewardInput(r"\boxed{12345678901234567890.5}", "12345678901234567890")) == 0.0
    )
    assert (
        load_verifier("math_17k_acc")[0](RewardInput(r"\boxed{12345678901234567890.0}", "12345678901234567890")) == 1.0
    )
