"""Verifiers: what each rule scores, and what it refuses to score."""

from __future__ import annotations

import pytest

from async_grpo.rewards.verifiers.answers import answer_tag, format_tags, gsm8k


@pytest.mark.parametrize("completion", ["18", "18.", "18.00", "$18", "$ 18", r"\$18", "18%", "+18", "36/2", "18 eggs"])
def test_one_number_grades_however_it_is_written(completion: str) -> None:
    assert gsm8k(f"#### {completion}", "18") == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
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
)
def test_gsm8k_finds_the_final_answer(completion: str, answer: str) -> None:
    assert gsm8k(completion, answer) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
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
)
def test_gsm8k_scores_anything_else_0(completion: str, answer: str) -> None:
    assert gsm8k(completion, answer) == 0.0


def test_gsm8k_refuses_a_reference_that_is_not_a_number() -> None:
    with pytest.raises(ValueError, match="not a number"):
        gsm8k("18", "a dozen")


@pytest.mark.parametrize(
    ("completion", "score"),
    [
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
)
def test_answer_tag_compares_the_last_well_formed_tag(completion: str, score: float) -> None:
    assert answer_tag(completion, " 834") == score


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("<think>a\nb</think>\n\n<answer>b\nc</answer>", 1.0),
        ("<think></think><answer></answer>", 1.0),
        (" <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer>!", 0.0),
        ("<answer>b</answer>", 0.0),
    ],
)
def test_format_wants_thinking_then_an_answer_and_nothing_else(completion: str, score: float) -> None:
    assert format_tags(completion, "whatever") == score
