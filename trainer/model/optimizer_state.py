"""State of Megatron's distributed optimizers: AdamW's state per parameter, saved and loaded by checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from trainer.model.optimizer_shards import restore_optimizer_state, sharded_optimizer_state

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's moments in torch's state of a parameter."""


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
