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

TRAINING_PASSES = 3
"""Cost of a forward and a backward pass, in forward passes."""
ADAPTER_TRAINING_PASSES = 2
"""The same with LoRA adapters: frozen matrices need no weight gradient."""

StepValues = dict[str, Any]
"""Key -> value of the metrics that are computed from a step's totals (`StepTotals.values`)."""


def step_row(
    batch: Batch,
    values: StepValues | None,
    stats: BufferStats | None = None,
    *,
    lr: float,
    seconds: dict[str, float],
    peak_flops: float | None = None,
    cpu_wait_s: float = 0.0,
) -> dict[str, Any]:
    """Return the row of metrics.jsonl (`telemetry.metrics.METRICS` explains its keys), without what was not measured.

    `values` is None for a skipped step. `stats` are the buffer's counters after the batch was released. The row is
    written before the step's own checkpoint, so `checkpoint_s`, `step_s` and `cpu_wait_s` contain the previous one.
    `peak_flops`: FLOP/s of all ranks together. `cpu_wait_s`: maximum over the ranks.
    """
    measured = {key: value for key, value in (values or {}).items() if value is not None}
    step_s = sum(phase_s for name, phase_s in seconds.items() if name != START)
    compute_s = sum(seconds.get(name, 0.0) for name in COMPUTE)
    return {
        "kind": "step",
        "step": batch.version + 1,
        "version": batch.version,
        "epoch": batch.epoch,
        "time_s": time.time(),
        "replayed": batch.replayed,
        "groups": len(batch.groups),
        "lr": lr,
        **batch_metrics(batch.groups),
        **_age_metrics(batch),
        **_buffer_metrics(stats),
        **measured,
        **_speed_metrics(measured, step_s, compute_s, peak_flops),
        "skipped_steps": int(values is None),
        **{f"{name}_s": seconds.get(name, 0.0) for name in PHASES},
        "start_s": seconds.get(START, 0.0),
        "step_s": step_s,
        "cpu_wait_s": cpu_wait_s,
    }


def trained_row(batch: Batch, config: RunConfig, *, skipped: bool) -> dict[str, Any]:
    """Return the row of trained.jsonl: sequence number -> advantages, for the groups that samples/*.jsonl contains.

    Advantages are those of the group's rule, before normalisation over the batch. They are None if they also depend on
    the passes of the step: with a penalty in the reward (`kl_in: reward`) or importance weights in the advantage
    (`opob`).
    """
    objective = config.trainer.objective
    advantages: list[list[float]] | None = None
    needs_pass = (
        objective.subtracts_kl_from_rewards
        or objective.subtracts_kl_from_advantages
        or objective.advantages_use_weights
    )
    if not needs_pass:
        weights = {function.name: function.weight for function in config.rewards.functions}
        advantages = group_advantages(batch.groups, objective.advantage, reward_weights=weights)

    groups: dict[int, list[float] | None] = {}
    for index, group in enumerate(batch.groups):
        if not is_sampled(group.seq, config.telemetry.samples_every):
            continue
        groups[group.seq] = None if advantages is None else [round(value, 4) for value in advantages[index]]
    return {"step": batch.version + 1, "skipped": skipped, "mask_below": batch.mask_below, "groups": groups}


def _speed_metrics(
    measured: Mapping[str, float], step_s: float, compute_s: float, peak_flops: float | None
) -> dict[str, float]:
    """Return throughput over the whole step and over its computing time.

    MFU counts useful operations only: passes before the first update and recomputation cost time and count nothing.
    """
    if not measured or compute_s <= 0:
        return {}
    metrics = {
        "tokens_per_s": measured["trained_tokens"] / step_s,
        "read_tokens_per_s": measured["read_tokens"] / compute_s,
    }
    if peak_flops is not None:
        metrics["mfu"] = measured["model_flops"] / (compute_s * peak_flops)
    return metrics


def batch_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """Return statistics of rewards, over samples that have one, and of lengths, over all samples.

    `informative_groups` is the fraction of groups whose rewards differ: the others have advantage 0.
    """
    samples = [sample for group in groups for sample in group.samples]
    group_rewards = [[sample.reward for sample in group.samples if sample.reward is not None] for group in groups]
    rewards = [reward for in_group in group_rewards for reward in in_group]
    means = [float(np.mean(in_group)) for in_group in group_rewards if in_group]
    lengths = [len(sample.token_ids()) for sample in samples]

    metrics: dict[str, Any] = {}
    if rewards:
        metrics["reward_mean"] = float(np.mean(rewards))
        metrics["reward_std"] = float(np.std(rewards))
    if len(means) > 1:
        # Samples of a group share a prompt, so only groups are independent: the standard error is that of group means.
        metrics["reward_error"] = float(np.std(means, ddof=1)) / math.sqrt(len(means))
    metrics["reward_by_function"] = _mean_scores(samples)
    metrics["unverifiable_samples"] = len(samples) - len(rewards)
    metrics["informative_groups"] = sum(len(set(in_group)) > 1 for in_group in group_rewards) / len(groups)
    metrics["completion_tokens_mean"] = float(np.mean(lengths))
    metrics["completion_tokens_max"] = max(lengths)
    metrics["truncated_fraction"] = sum(sample.finish_reason == "length" for sample in samples) / len(samples)
    return metrics


def _buffer_metrics(stats: BufferStats | None) -> dict[str, Any]:
    if stats is None:
        return {}
    return {
        "staleness": stats.staleness,
        "buffer_groups": {
            "waiting": stats.waiting,
            "inflight": stats.inflight,
            "ready": stats.ready,
            "taken": stats.taken,
        },
        "released_groups": stats.released,
    }


def _mean_scores(samples: Iterable[Sample]) -> dict[str, float]:
    """Reward function -> mean of its scores, over the samples that have one."""
    scores: dict[str, list[float]] = {}
    for sample in samples:
        for name, score in sample.rewards.items():
            scores.setdefault(name, []).append(score)
    return {name: float(np.mean(values)) for name, values in sorted(scores.items())}


def _age_metrics(batch: Batch) -> dict[str, Any]:
    """Ages of the trained tokens in optimizer steps, and the number of tokens that are masked for their age."""
    tokens_by_age: Counter[int] = Counter()
    masked = 0
    for sample in (sample for group in batch.groups for sample in group.samples if sample.reward is not None):
        versions, counts = np.unique(sample.token_versions()[sample.written_by_policy()], return_counts=True)
        for version, count in zip(versions.tolist(), counts.tolist(), strict=True):
            if version < batch.mask_below:
                masked += count
            else:
                tokens_by_age[age(batch.version, version)] += count
    total = max(1, tokens_by_age.total())
    return {
        "masked_tokens": masked,
        "age_mean": sum(steps * count for steps, count in tokens_by_age.items()) / total,
        "age_max": max(tokens_by_age, default=0),
        "age_histogram": {str(steps): tokens_by_age[steps] for steps in sorted(tokens_by_age)},
    }
