"""Megatron's distributed AdamW: settings, one update, its state for checkpoints, and the learning rate.

    gradients --norm, rejected if not finite--> clip --> AdamW on fp32 masters --> weights of the model

Weight decay applies to matrices, not to norms and biases. `learning_rate` is a pure function of the version and is set
at every update, so a resumed run continues the schedule from its version alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from torch import Tensor

from async_grpo.config.trainer import OptimizerConfig
from async_grpo.errors import NonFiniteStep
from trainer.model.optimizer_shards import restore_optimizer_state, sharded_optimizer_state

if TYPE_CHECKING:
    from trainer.model.optimizer_offload import StateOffload

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's moments in torch's state of a parameter."""


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


def distributed_optimizers(optimizer: Any) -> list[Any]:
    """Return Megatron's distributed optimizers. Experts have a separate one."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def parameter_states(optimizer: Any) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield (this rank's shard of a parameter, its AdamW state)."""
    for part in distributed_optimizers(optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, part.optimizer.state.get(parameter, {})


def prepare_for_checkpoint(optimizer: Any) -> None:
    """Prepare the optimizer for Megatron's `sharded_state_dict`, to save or to load.

    Allocates the moments, which torch's AdamW would only allocate in its first step. Replaces Megatron's method for the
    state of parameters, which would gather the whole state on one rank.
    """
    for part in distributed_optimizers(optimizer):
        part.sharded_param_state_fully_reshardable = MethodType(sharded_optimizer_state, part)
        if not isinstance(part.optimizer, torch.optim.AdamW):
            continue
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                if not state:
                    moments = {name: torch.zeros_like(parameter.data) for name in MOMENTS}
                    state.update(step=torch.tensor(0.0), **moments)


def load_optimizer_state(optimizer: Any, state: dict[str, Any]) -> None:
    """Load the optimizer from a filled `sharded_state_dict`."""
    # Take out the state of the parameters: Megatron's and MindSpeed's `load_state_dict` do not support our format.
    parameter_states_of_parts = [part_state.pop("param_state") for part_state in split_optimizer_state(state)]
    optimizer.load_state_dict(state)

    for part, loaded in zip(distributed_optimizers(optimizer), parameter_states_of_parts, strict=True):
        restore_optimizer_state(part, loaded)
        if isinstance(part.optimizer, torch.optim.AdamW):
            for parameter_state in part.optimizer.state.values():
                # After loading, all parameters share one `step` tensor, and AdamW would increase it once per parameter.
                parameter_state["step"] = parameter_state["step"].clone()


def split_optimizer_state(state: dict[Any, Any]) -> list[dict[str, Any]]:
    """Split the result of Megatron's `sharded_state_dict` by distributed optimizer."""
    if "param_state" in state:
        return [state]
    return [state[index] for index in sorted(state)]


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
