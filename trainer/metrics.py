"""The row of a training step: what its batch was like, what the step did, and how long it took."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np

from async_grpo.staleness.window import age
from async_grpo.wire import Batch, Group
from trainer.phases import START, WAIT
from trainer.result import StepResult

PHASES = (WAIT, "pack", "prox", "reference", "train", "optimizer", "publish", "checkpoint")
COMPUTE = ("pack", "prox", "reference", "train", "optimizer")
"""What the ranks spend on the step itself."""


def step_row(
    batch: Batch, result: StepResult | None, *, lr: float, seconds: dict[str, float], peak_flops: float | None = None
) -> dict[str, Any]:
    """For metrics.jsonl; `step` is the version that the step made; what was not measured is left out.

    `result` is None for a step that was skipped. It is written before the step's own checkpoint: `checkpoint_s` and
    `step_s` have the one before. `peak_flops`: of all ranks together, a second.
    """
    outcome = {key: value for key, value in asdict(result).items() if value is not None} if result else {}
    return {
        "kind": "step",
        "step": batch.version + 1,
        "version": batch.version,
        "epoch": batch.epoch,
        "time_s": time.time(),
        "replayed": batch.replayed,
        "groups": len(batch.groups),
        "lr": lr,
        **_rewards(batch.groups),
        **_ages(batch),
        **outcome,
        **(_speed(result, sum(seconds.get(name, 0.0) for name in COMPUTE), peak_flops) if result else {}),
        "skipped_steps": int(result is None),
        **{f"{name}_s": seconds.get(name, 0.0) for name in PHASES},
        "start_s": seconds.get(START, 0.0),
        "step_s": sum(taken_s for name, taken_s in seconds.items() if name != START),
    }


def _speed(result: StepResult, compute_s: float, peak_flops: float | None) -> dict[str, float]:
    """Over the time that the ranks compute. MFU is of useful operations: passes before the first update and what is
    computed anew take time and count nothing."""
    if compute_s <= 0:
        return {}
    used = {} if peak_flops is None else {"mfu": result.model_flops / (compute_s * peak_flops)}
    return {"tokens_per_s": result.read_tokens / compute_s, **used}


def _rewards(groups: list[Group]) -> dict[str, Any]:
    """Over verifiable samples; `informative_groups` is the share of groups whose rewards differ."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    return {
        **({"reward_mean": float(np.mean(rewards)), "reward_std": float(np.std(rewards))} if rewards else {}),
        "unverifiable_samples": len(samples) - len(rewards),
        "informative_groups": sum(_informative(group) for group in groups) / len(groups),
        "completion_tokens_mean": float(np.mean([len(sample.token_ids()) for sample in samples])),
    }


def _informative(group: Group) -> bool:
    """Whether the rewards of the group differ, so that it has a gradient."""
    return len({sample.reward for sample in group.samples if sample.reward is not None}) > 1


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
