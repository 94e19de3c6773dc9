"""Megatron's distributed AdamW: settings, one update, and the learning rate.

    gradients --norm, rejected if not finite--> clip --> AdamW on fp32 masters --> weights of the model

Weight decay applies to matrices, not to norms and biases. `learning_rate` is a pure function of the version and is set
at every update, so a resumed run continues the schedule from its version alone.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

from async_grpo.config.trainer import OptimizerConfig
from async_grpo.errors import NonFiniteStep
from trainer.model.optimizer_offload import StateOffload


def optimizer_settings(config: OptimizerConfig, dtype: torch.dtype) -> MegatronOptimizerConfig:
    """Return the settings for `get_megatron_optimizer`; `dtype` is that of the weights."""
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )


def update_weights(optimizer: Any, lr: float, weight_decay: float, offload: StateOffload | None = None) -> float:
    """Make one optimizer step and return the gradient norm before clipping.

    Raises NonFiniteStep, on all ranks and before any weight changes, if the gradient is not finite.
    """
    with offload.on_device() if offload is not None else nullcontext():
        optimizer.prepare_grads()
        grad_norm = float(optimizer.get_grad_norm())
        if not math.isfinite(grad_norm):
            raise NonFiniteStep(
                f"the gradient norm is {grad_norm}: this step would destroy the weights, so it was not taken. "
                "Lower trainer.optimizer.lr or trainer.objective.behaviour_cap"
            )
        for group in optimizer.param_groups:
            group["lr"] = lr
            # Megatron marks the groups with weight decay (wd_mult), but only its scheduler applies the mark, and we
            # have our own schedule.
            group["weight_decay"] = weight_decay * group["wd_mult"]
        optimizer.step()
    return grad_norm


def learning_rate(config: OptimizerConfig, version: int, steps: int) -> float:
    """Return the learning rate of the step `version` -> `version + 1` in a run of `steps` steps.

    The first `warmup_steps` steps rise linearly from lr / warmup_steps to lr. Then the rate is constant, or decays as a
    cosine or linearly to min_lr at the last step, and stays there.
    """
    if version < config.warmup_steps:
        return config.lr * (version + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(1, steps - 1 - config.warmup_steps)
    progress = min(1.0, (version - config.warmup_steps) / span)
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.min_lr + (config.lr - config.min_lr) * remaining
