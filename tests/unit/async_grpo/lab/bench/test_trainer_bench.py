"""Comparisons of the trainer bench, and steps that it refuses to compare."""

from __future__ import annotations

import pytest

from async_grpo.errors import TrainingError
from async_grpo.lab.bench.trainer.baselines import BenchStep
from async_grpo.lab.bench.trainer.measure import take_turns
from async_grpo.lab.bench.trainer.setup import BatchShape, Contestant, lengths_of, make_batch


def contestant(loss: float, grad_norm: float = 1.0) -> Contestant:
    return lambda: BenchStep(loss, grad_norm, 1.0)


def test_contestants_take_turns_in_alternating_order() -> None:
    names: list[str] = []
    results = take_turns({"a": contestant(0.5), "b": contestant(0.5)}, 2, names.append)
    assert names == ["a", "b", "b", "a"]
    assert [len(timed.seconds) for timed in results.values()] == [2, 2]


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (contestant(0.5002), r"loss of 0\.5002 .* 0\.5 "),
        (contestant(0.5, 1.0002), r"norm of 1\.0002, .* 1:"),
        (contestant(float("nan")), "loss of nan "),
    ],
)
def test_steps_with_different_results_are_not_compared(other: Contestant, difference: str) -> None:
    with pytest.raises(TrainingError, match=f"b .*{difference}"):
        take_turns({"a": contestant(0.5), "b": other}, 1, lambda _: None)


def test_the_batch_depends_only_on_its_shape_and_prompts() -> None:
    mix = BatchShape(groups=2, group_size=3)
    assert make_batch(mix, 500) == make_batch(mix, 500) != make_batch(BatchShape(groups=2, group_size=3, seed=2), 500)
    batch = make_batch(mix, 500, [[7, 8, 9], [10, 11]])
    assert {tuple(group.task.prompt_ids().tolist()) for group in batch.groups} <= {(7, 8, 9), (10, 11)}


def test_lengths_are_within_the_bounds_of_the_mix_and_heavy_tailed() -> None:
    mix = BatchShape(groups=50)
    lengths = lengths_of(mix, 500)
    assert len(lengths) == 400
    assert mix.prompt[0] <= min(lengths) and max(lengths) < mix.prompt[1] + mix.longest
    assert max(lengths) > 3 * sum(lengths) / len(lengths)
