"""The rows of a training step."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from async_grpo.config import RunConfig
from async_grpo.staleness import age
from async_grpo.telemetry.metrics import COMPUTE, PHASES
from async_grpo.telemetry.rows import is_sampled
from async_grpo.telemetry.timeline import START
from async_grpo.wire import Batch, Group, Sample
from buffer.base import BufferStats
from trainer.batch.sequences import group_advantages

TRAINING, TRAINING_ADAPTERS = 3, 2
"""Cost of a forward and a backward pass, in forward passes. Frozen matrices get no gradient of their own."""

StepValues = dict[str, Any]
"""Key -> value of the metrics that are made of a step's totals (`StepTotals.values`)."""


def step_row(
    batch: Batch,
    found: StepValues | None,
    stats: BufferStats | None = None,
    *,
    lr: float,
    seconds: dict[str, float],
    peak_flops: float | None = None,
    cpu_wait_s: float = 0.0,
) -> dict[str, Any]:
    """The row of metrics.jsonl (`telemetry.metrics.METRICS` explains its keys). What was not measured is left out.

    `found` is None for a step that was skipped. `stats` are the buffer's counters after the batch was released. The row
    is written before the step's own checkpoint: `checkpoint_s`, `step_s` and `cpu_wait_s` have the one before.
    `peak_flops`: floating-point operations a second, of all ranks together. `cpu_wait_s`: of the rank that waited most.
    """
    measured = {key: value for key, value in (found or {}).items() if value is not None}
    step_s = sum(taken_s for name, taken_s in seconds.items() if name != START)
    return {
        "kind": "step",
        "step": batch.version + 1,
        "version": batch.version,
        "epoch": batch.epoch,
        "time_s": time.time(),
        "replayed": batch.replayed,
        "groups": len(batch.groups),
        "lr": lr,
        **batch_figures(batch.groups),
        **_ages(batch),
        **_buffer_figures(stats),
        **measured,
        **_speed(measured, step_s, sum(seconds.get(name, 0.0) for name in COMPUTE), peak_flops),
        "skipped_steps": int(found is None),
        **{f"{name}_s": seconds.get(name, 0.0) for name in PHASES},
        "start_s": seconds.get(START, 0.0),
        "step_s": step_s,
        "cpu_wait_s": cpu_wait_s,
    }


def trained_row(batch: Batch, config: RunConfig, *, skipped: bool) -> dict[str, Any]:
    """The row of trained.jsonl: by sequence number, the advantages of the groups that are in samples/*.jsonl.

    With a penalty in the reward (`kl_in: reward`), or importance weights in the advantage (`opob`), they also depend on
    the passes of the step, and the row has none.
    """
    objective, every = config.trainer.objective, config.telemetry.samples_every
    unknown = objective.penalises_rewards or objective.weighs_samples
    advantages = [None] * len(batch.groups) if unknown else group_advantages(batch.groups, objective.advantage)
    return {
        "step": batch.version + 1,
        "skipped": skipped,
        "mask_below": batch.mask_below,
        "groups": {
            group.seq: values and [round(value, 4) for value in values]
            for group, values in zip(batch.groups, advantages, strict=True)
            if is_sampled(group.seq, every)
        },
    }


def _speed(
    measured: Mapping[str, float], step_s: float, compute_s: float, peak_flops: float | None
) -> dict[str, float]:
    """Throughput of the whole step, and while the ranks compute. MFU counts useful operations only: passes before the
    first update and recomputation take time but add none."""
    if not measured or compute_s <= 0:
        return {}
    used = {} if peak_flops is None else {"mfu": measured["model_flops"] / (compute_s * peak_flops)}
    return {
        "tokens_per_s": measured["trained_tokens"] / step_s,
        "read_tokens_per_s": measured["read_tokens"] / compute_s,
        **used,
    }


def batch_figures(groups: Sequence[Group]) -> dict[str, Any]:
    """Rewards over the verifiable samples, and lengths over all. `informative_groups` is the share of groups whose
    rewards differ: the others have no gradient. `reward_error` needs two groups with rewards."""
    samples = [sample for group in groups for sample in group.samples]
    by_group = [[sample.reward for sample in group.samples if sample.reward is not None] for group in groups]
    rewards = [reward for each in by_group for reward in each]
    means = [float(np.mean(each)) for each in by_group if each]
    lengths = [len(sample.token_ids()) for sample in samples]
    return {
        **({"reward_mean": float(np.mean(rewards)), "reward_std": float(np.std(rewards))} if rewards else {}),
        **({"reward_error": float(np.std(means, ddof=1)) / math.sqrt(len(means))} if len(means) > 1 else {}),
        "reward_by_function": _by_function(samples),
        "unverifiable_samples": len(samples) - len(rewards),
        "informative_groups": sum(len(set(each)) > 1 for each in by_group) / len(groups),
        "completion_tokens_mean": float(np.mean(lengths)),
        "completion_tokens_max": max(lengths),
        "truncated_fraction": sum(sample.finish_reason == "length" for sample in samples) / len(samples),
    }


def _buffer_figures(stats: BufferStats | None) -> dict[str, Any]:
    if stats is None:
        return {}
    states = ("waiting", "inflight", "ready", "taken")
    return {
        "staleness": stats.staleness,
        "buffer_groups": {state: getattr(stats, state) for state in states},
        "released_groups": stats.released,
    }


def _by_function(samples: Iterable[Sample]) -> dict[str, float]:
    """Reward function -> mean of its scores, over the samples that have one."""
    scores: dict[str, list[float]] = {}
    for sample in samples:
        for name, score in sample.rewards.items():
            scores.setdefault(name, []).append(score)
    return {name: float(np.mean(found)) for name, found in sorted(scores.items())}


def _ages(batch: Batch) -> dict[str, Any]:
    """Ages of the tokens that get a gradient, in optimizer steps, and how many are too old to."""
    tokens: Counter[int] = Counter()
    masked = 0
    for sample in (sample for group in batch.groups for sample in group.samples if sample.reward is not None):
        versions, counts = np.unique(sample.token_versions()[sample.written_by_policy()], return_counts=True)
        for version, count in zip(versions.tolist(), counts.tolist(), strict=True):
            if version < batch.mask_below:
                masked += count
            else:
                tokens[age(batch.version, version)] += count
    total = max(1, tokens.total())
    return {
        "masked_tokens": masked,
        "age_mean": sum(steps * count for steps, count in tokens.items()) / total,
        "age_max": max(tokens, default=0),
        "age_histogram": {str(steps): tokens[steps] for steps in sorted(tokens)},
    }
