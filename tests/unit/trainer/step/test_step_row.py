"""The metrics of a step's row, compared with values counted by hand."""

from __future__ import annotations

from typing import get_args

import pytest
from msgspec import structs

from async_grpo.telemetry.metrics import METRICS, Metric, Unit
from async_grpo.wire.records import Batch, Group
from buffer import BufferStats
from tests.support.buffer_cases import sample, tasks
from trainer.step.results import batch_metrics, step_row


def group(*scored: tuple[float | None, int, str]) -> Group:
    """A group of samples, each with its reward, length and finish reason."""
    samples = [
        structs.replace(
            sample(version=3, length=length),
            reward=reward,
            rewards={} if reward is None else {"right": reward, "short": 1 / length},
            finish_reason=reason,
        )
        for reward, length, reason in scored
    ]
    return Group(seq=0, attempt=1, task=tasks(0, 1)[0], samples=samples)


GROUPS = [
    group((1.0, 4, "stop"), (0.0, 8, "length")),  # mean 0.5
    group((1.0, 2, "stop"), (1.0, 4, "stop")),  # mean 1
    group((0.0, 8, "length"), (None, 10, "length")),  # mean 0
]


def test_rewards_have_a_standard_error_over_groups_and_a_mean_per_function() -> None:
    metrics = batch_metrics(GROUPS)
    assert metrics["reward_mean"] == pytest.approx(3 / 5)
    assert metrics["reward_error"] == pytest.approx(0.5 / 3**0.5)  # of 0.5, 1 and 0: deviation 0.5, three groups
    assert metrics["reward_by_function"]["right"] == pytest.approx(3 / 5)
    assert metrics["reward_by_function"]["short"] == pytest.approx((1 / 4 + 1 / 8 + 1 / 2 + 1 / 4 + 1 / 8) / 5)
    assert "reward_error" not in batch_metrics(GROUPS[:1])


def test_lengths_have_mean_maximum_and_truncated_fraction() -> None:
    metrics = batch_metrics(GROUPS)
    assert (metrics["completion_tokens_mean"], metrics["completion_tokens_max"]) == (6.0, 10)
    assert metrics["truncated_fraction"] == 3 / 6
    assert metrics["informative_groups"] == pytest.approx(1 / 3)


def test_a_row_counts_buffer_groups_by_state_and_released_groups_by_reason() -> None:
    batch = Batch(version=3, epoch=1, groups=GROUPS[:1])
    counters = {"epoch": 1, "version": 4, "tasks_put": 9, "waiting": 2, "inflight": 3, "ready": 1, "taken": 0}
    stats = BufferStats(**counters, admitted=7, released={"trained": 2, "stale": 1})
    row = step_row(batch, None, stats, lr=0.1, seconds={})
    assert row["buffer_groups"] == {"waiting": 2, "inflight": 3, "ready": 1, "taken": 0}
    assert row["released_groups"] == {"trained": 2, "stale": 1}


def test_tokens_per_second_include_the_waiting_time() -> None:
    batch = Batch(version=3, epoch=1, groups=GROUPS[:1])
    seconds = {"start": 9.0, "wait": 2.0, "train": 1.0, "publish": 1.0}
    row = step_row(batch, {"trained_tokens": 12, "read_tokens": 30, "model_flops": 1.0}, lr=0.1, seconds=seconds)
    assert (row["step_s"], row["tokens_per_s"], row["read_tokens_per_s"]) == (4.0, 3.0, 30.0)


def test_every_metric_has_a_name_without_its_unit_and_a_known_unit() -> None:
    by_key = {metric.key: metric for metric in METRICS}
    assert {metric.unit for metric in METRICS} <= set(get_args(Unit))
    age_mean = by_key["age_mean"]
    assert (age_mean.label, age_mean.unit, age_mean.group) == ("age, mean", "steps", "staleness")
    assert by_key["completion_tokens_max"].label == "completion length, max"
    assert len({metric.label for metric in METRICS}) == len(METRICS)


def test_a_metric_without_a_unit_is_rejected() -> None:
    with pytest.raises(TypeError, match="unit"):
        Metric(key="x", tag="", label="x", doc="X.")  # type: ignore[call-arg]
