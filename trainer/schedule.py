"""The learning rate of every step. Pure, so that a resumed run needs nothing but its version."""

from __future__ import annotations

import math

from async_grpo.config.trainer import OptimizerConfig


def learning_rate(config: OptimizerConfig, version: int, steps: int) -> float:
    """Of the step `version` -> `version + 1` in a run of `steps` steps.

    Linear warm-up from lr / warmup_steps to lr in the first `warmup_steps` steps; then constant, or
    down to min_lr (never below) at the last step, as a cosine or a line.
    """
    if version < config.warmup_steps:
        return config.lr * (version + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(1, steps - 1 - config.warmup_steps)
    progress = min(1.0, (version - config.warmup_steps) / span)
    share = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.min_lr + (config.lr - config.min_lr) * share
