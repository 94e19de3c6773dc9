"""Log-probability gaps between engine and trainer that are plausible, and gaps that are suspicious."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from async_grpo.telemetry.metrics import MAXIMA, SUMS
from async_grpo.wire import Batch, Group, Sample, Task, VersionSpan, tokens_to_bytes
from tests.support.rollout_fakes import config_of
from trainer.model.policy import Policy
from trainer.step import step
from trainer.step.statistics import GapWatch

VERSION = 5


def batch_of(
    tokens: int = 100, *, versions: Sequence[int] = (VERSION,), logprob: float = -0.7, reward: float | None = 1.0
) -> Batch:
    """One sample whose tokens come from the versions, in equal parts."""
    ends = [round(tokens * index / len(versions)) for index in range(len(versions) + 1)]
    spans = [VersionSpan(version, *part) for version, part in zip(versions, pairwise(ends), strict=True)]
    sample = Sample(
        tokens=tokens_to_bytes([7] * tokens),
        logprobs=np.full(tokens, logprob, np.float32).tobytes(),
        spans=spans,
        finish_reason="stop",
        text="x",
        reward=reward,
    )
    task = Task(index=0, prompt="one and one", prompt_tokens=tokens_to_bytes([7, 8]), answer="2")
    return Batch(epoch=1, version=VERSION, groups=[Group(seq=0, attempt=1, task=task, samples=[sample])])


def gap_values(mean: float, tokens: int = 100, **fields: Any) -> dict[str, Any]:
    """The values of a step or a probe that the watch reads."""
    gap = {"logprob_gap_mean": mean, "logprob_gap_max": 2 * mean} if tokens else {}
    return {"updates": 1, "overlong_samples": 0, "gap_tokens": tokens, **gap, **fields}


NONE = {"logprob_gap_mean": None, "logprob_gap_max": None}


def test_a_gap_that_covers_no_token_of_the_current_version_is_suspicious() -> None:
    warning = GapWatch().check_step(batch_of(), gap_values(0.0, tokens=0, **NONE))
    assert warning is not None and "step 6 has 100 tokens of the present version" in warning
    warning = GapWatch().check_probe(batch_of(reward=None), {"gap_tokens": 0})
    assert warning is not None and "the probe of version 5 has 100 tokens" in warning


@pytest.mark.parametrize(
    ("batch", "fields"),
    [
        (batch_of(versions=[4]), {}),
        (batch_of(versions=[4, VERSION]), {}),
        (batch_of(reward=None), {}),
        (batch_of(), {"updates": 4}),
        (batch_of(), {"overlong_samples": 1}),
    ],
    ids=["older", "mixed", "not judged", "in a later update, perhaps", "too long, perhaps"],
)
def test_steps_without_a_comparable_token_have_no_gap(batch: Batch, fields: dict[str, Any]) -> None:
    assert GapWatch().check_step(batch, gap_values(0.0, tokens=0, **NONE, **fields)) is None


def test_a_gap_of_exactly_zero_is_warned_about_once() -> None:
    watch = GapWatch()
    warnings = [watch.check_step(batch_of(), gap_values(0.0)) for _ in range(20)]
    emitted = [warning for warning in warnings if warning is not None]
    assert len(emitted) == 1
    assert warnings.index(emitted[0]) == 2 and "exactly 0 over 300 tokens up to step 6" in emitted[0]


def test_a_certain_policy_and_a_gap_that_is_sometimes_zero_are_not_suspicious() -> None:
    watch = GapWatch()
    for _ in range(20):
        assert watch.check_step(batch_of(logprob=0.0), gap_values(0.0)) is None
    for step_index in range(20):
        mean = 1e-7 * (1 + step_index) if step_index % 2 else 0.0
        assert watch.check_step(batch_of(), gap_values(mean)) is None


def test_a_gap_that_stays_the_same_over_four_steps_is_suspicious() -> None:
    watch = GapWatch()
    for mean in (1e-7, 2e-7, 2e-7, 2e-7):
        assert watch.check_step(batch_of(), gap_values(mean)) is None
        assert watch.check_step(batch_of(versions=[4]), gap_values(0.0, tokens=0, **NONE)) is None
    warning = watch.check_step(batch_of(), gap_values(2e-7))
    assert warning is not None and "for the 4th time in a row" in warning


def test_few_tokens_may_have_the_same_gap_again() -> None:
    watch = GapWatch()
    for _ in range(20):
        assert watch.check_step(batch_of(10), gap_values(2e-7, tokens=10)) is None


def test_a_probe_without_a_token_of_its_version_has_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "own_micro_batches", lambda *_: [])
    monkeypatch.setattr(step, "reduce_sums", lambda _: (dict.fromkeys(SUMS, 0.0), dict.fromkeys(MAXIMA, 0.0)))
    policy = cast(Policy, SimpleNamespace(run_micro_batches=lambda *_, **__: []))
    assert step.measure_gap(policy, batch_of(20, versions=[4]), config_of(max_staleness=1)) == {"gap_tokens": 0}
