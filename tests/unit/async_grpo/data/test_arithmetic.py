"""The arithmetic task: correct demonstrations, and streams that never touch the held-out set."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from async_grpo.config.model import ArithmeticTaskConfig, WarmupConfig
from async_grpo.data.arithmetic import Problem, ProblemSet, demonstration, shortcut
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
def test_a_demonstration_adds_column_by_column_with_the_carry(problem: Problem, completion: str) -> None:
    assert demonstration(problem) == completion


def test_demonstrations_and_shortcuts_earn_the_reward() -> None:
    problems = ProblemSet(TASK, seed=1)
    for problem in (problems.problem("train", index) for index in range(200)):
        assert answer_tag(demonstration(problem), problem.answer) == 1.0
        assert answer_tag(shortcut(problem), problem.answer) == 1.0
        assert format_tags(demonstration(problem), problem.answer) == 1.0


def test_the_same_seed_gives_the_same_problems_in_any_order() -> None:
    forwards = [ProblemSet(TASK, seed=3).problem("train", index) for index in range(20)]
    problems = ProblemSet(TASK, seed=3)
    backwards = [problems.problem("train", index) for index in reversed(range(20))]
    assert forwards == backwards[::-1]
    assert problems.held_out == ProblemSet(TASK, seed=3).held_out


def test_another_seed_or_another_stream_gives_other_problems() -> None:
    problems = ProblemSet(TASK, seed=3)
    train = [problems.problem("train", index) for index in range(20)]
    assert train != [problems.problem("probe", index) for index in range(20)]
    assert train != [ProblemSet(TASK, seed=4).problem("train", index) for index in range(20)]


def test_the_held_out_problems_are_distinct_and_as_many_as_configured() -> None:
    held_out = ProblemSet(ArithmeticTaskConfig(held_out=100), seed=1).held_out
    assert len(held_out) == len(set(held_out)) == 100


def test_no_stream_contains_a_held_out_problem_even_when_half_of_all_are_held_out() -> None:
    problems = ProblemSet(ArithmeticTaskConfig(digits=2, held_out=4050), seed=1)
    drawn = {problems.problem("train", index) for index in range(5000)}
    assert drawn.isdisjoint(problems.held_out)


def test_every_prompt_has_the_configured_number_of_digits() -> None:
    problems = ProblemSet(ArithmeticTaskConfig(digits=4), seed=1)
    assert {len(problems.problem("train", index).prompt) for index in range(200)} == {10}


def test_no_demonstration_exceeds_the_stated_number_of_tokens() -> None:
    longest = demonstration(Problem(999, 999))
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    tokens = len(longest) - sum(map(len, tags)) + len(tags) + 1
    assert tokens == TASK.max_completion_tokens


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"heads": 8}, "Set heads to"),
        ({"kv_heads": 3}, "Set kv_heads to"),
        ({"max_positions": 32}, "Raise max_positions to"),
        ({"accuracy_floor": 0.6}, "Lower accuracy_floor"),
    ],
)
def test_a_warm_up_that_cannot_work_is_refused_with_its_fix(fields: dict[str, float], fix: str) -> None:
    with pytest.raises(ValidationError, match=fix):
        WarmupConfig.model_validate(fields)
