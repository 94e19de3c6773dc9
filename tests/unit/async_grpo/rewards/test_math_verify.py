"""The symbolic verifier: what it takes for equal, and the traps of its package."""

from __future__ import annotations

import threading

import pytest

from async_grpo.rewards.verifiers.symbolic import math_verify


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
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
)
def test_what_is_equal_scores_1(completion: str, answer: str) -> None:
    assert math_verify(completion, answer) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"\boxed{3}", r"3\sqrt{2}"),  # a bare reference would be read as 3
        (r"\boxed{19}", "18"),
        (r"\boxed{1}, no, \boxed{2}", "2"),  # the package takes this for the set {1, 2}
        (r"\boxed{[0, 1]}", "[0, 1)"),
        ("no expression at all", "18"),
        ("", "18"),
    ],
)
def test_anything_else_scores_0(completion: str, answer: str) -> None:
    assert math_verify(completion, answer) == 0.0


@pytest.mark.parametrize("answer", ["", "solution ####"])
def test_a_reference_that_is_no_expression_cannot_be_judged(answer: str) -> None:
    with pytest.raises(ValueError, match="no mathematical expression"):
        math_verify("18", answer)


def test_it_works_outside_of_the_main_thread_where_signals_do_not() -> None:
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(math_verify(r"\boxed{18}", "18")))
    thread.start()
    thread.join()
    assert scores == [1.0]
