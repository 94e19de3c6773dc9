"""The learning rate of a step depends on its version alone."""

from __future__ import annotations

import pytest

from async_grpo.config.trainer import OptimizerConfig
from trainer.model.optimizer import learning_rate


def rates(steps: int = 11, **fields: object) -> list[float]:
    config = OptimizerConfig.model_validate({"lr": 1.0, **fields})
    return [learning_rate(config, version, steps) for version in range(steps)]


def test_warm_up_rises_in_equal_steps_to_the_peak() -> None:
    assert rates(warmup_steps=4)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_decay_ends_at_the_floor_at_the_last_step_and_passes_the_middle_halfway(schedule: str) -> None:
    found = rates(schedule=schedule, min_lr=0.2)
    assert (found[0], found[5], found[-1]) == pytest.approx((1.0, 0.6, 0.2))
    assert found == sorted(found, reverse=True)


def test_constant_stays() -> None:
    assert set(rates()) == {1.0}


def test_a_run_that_is_extended_never_goes_below_the_floor() -> None:
    config = OptimizerConfig(lr=1.0, schedule="linear", min_lr=0.1)
    assert learning_rate(config, 50, 11) == pytest.approx(0.1)
