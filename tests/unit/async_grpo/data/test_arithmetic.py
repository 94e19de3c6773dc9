"""The arithmetic task: correct demonstrations, and streams that never touch the held-out set."""

from __future__ import annotations

import pytest

from async_grpo.config.model import ArithmeticTaskConfig
from async_grpo.data.arithmetic import Problem, ProblemSet
from async_grpo.models.tiny.arithmetic import demonstration, shortcut
from async_grpo.rewards.verifiers.answers import answer_tag, format_tags

TASK = ArithmeticTaskConfig()


@pytest.mark.parametrize(
    ("problem", "completion"),
    [
        (Problem(478, 356), "<think>8+6+0=14 7+5+1=13 4+3+1=8</think><answer>834</answer>"),
        (Problem(999, 999), "<think>9+9+0=18 9+9+1=19 9+9+1=19</think><answer>1998</answer>"),
        (Problem(100, 200), "<think>0+0+0=0 0+0+0=0 1+2+0=3</think><answer>300</answer>"),
    ],
)
def test_a_demonstration_adds_columns_with_carry(problem: Problem, completion: str) -> None:
    assert demonstration(problem) == completion


def test_demonstrations_and_shortcuts_earn_the_reward() -> None:
    problems = ProblemSet(TASK, seed=1)
    for problem in (problems.problem("train", index) for index in range(200)):
        reasoned, answer = demonstration(problem), problem.answer
        assert (
            answer_tag(reasoned, answer) == format_tags(reasoned, answer) == answer_tag(shortcut(problem), answer) == 1
        )


def test_a_problem_is_a_function_of_seed_stream_and_index() -> None:
    def draw(seed: int, stream: str, *, backwards: bool = False) -> list[Problem]:
        problems = ProblemSet(TASK, seed)
        drawn = {index: problems.problem(stream, index) for index in sorted(range(20), reverse=backwards)}
        return [drawn[index] for index in range(20)]

    assert draw(3, "train") == draw(3, "train", backwards=True)
    assert draw(3, "train") not in (draw(3, "probe"), draw(4, "train"))
    assert ProblemSet(TASK, 3).held_out == ProblemSet(TASK, 3).held_out


def test_held_out_problems_are_distinct_and_in_no_stream() -> None:
    problems = ProblemSet(ArithmeticTaskConfig(digits=2, held_out=4050), seed=1)
    assert len(set(problems.held_out)) == 4050
    assert {problems.problem("train", index) for index in range(5000)}.isdisjoint(problems.held_out)


def test_every_prompt_has_the_configured_number_of_digits() -> None:
    problems = ProblemSet(ArithmeticTaskConfig(digits=4), seed=1)
    assert {len(problems.problem("train", index).prompt) for index in range(200)} == {10}


def test_demonstrations_stay_within_their_token_limit() -> None:
    longest = demonstration(Problem(999, 999))
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    tokens = len(longest) - sum(map(len, tags)) + len(tags) + 1
    assert tokens == TASK.max_completion_tokens
