"""Megatron's distributed AdamW: its settings, its learning rate, one update, and its state between two updates.

    gradients --norm, refused if not finite--> clip --> AdamW on fp32 masters --> weights of the model

Weight decay applies to matrices, not to norms and biases. `learning_rate` is a pure function of the version and is set
at every update, so a resumed run continues the schedule from its version alone.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from torch import Tensor

from async_grpo.config.trainer import OptimizerConfig
from async_grpo.errors import NonFiniteStep, WaitTimeout
from trainer.model.host_slabs import HostSlabs
from trainer.model.optimizer_shards import restore_optimizer_state, sharded_optimizer_state

_MOMENTS = ("exp_avg", "exp_avg_sq")


def optimizer_settings(config: OptimizerConfig, dtype: torch.dtype) -> MegatronOptimizerConfig:
    """The settings for `get_megatron_optimizer`; `dtype` is that of the weights."""
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


def update(optimizer: Any, lr: float, weight_decay: float, offload: StateOffload | None = None) -> float:
    """One optimizer step; returns the gradient norm before clipping.

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
            # Megatron states which groups decay (wd_mult) but leaves applying it to its scheduler.
            group["weight_decay"] = weight_decay * group["wd_mult"]
        optimizer.step()
    return grad_norm


class StateOffload:
    """Keeps fp32 masters and moments (12 bytes a parameter of this rank) in the host's memory.

    The device holds those of one parameter at a time, while it is updated, and writes the weights from there; the
    numbers are the same. Weights that are their own masters (float32) stay where they are. Megatron's own offload
    computes AdamW on the CPU, whose rounding is another.

    A checkpoint reads them where they are, because a copy would double them: the update after it waits until they are
    written.
    """

    def __init__(self, optimizer: Any, device: str) -> None:
        self._optimizer = optimizer
        self._device = device
        self._homes: dict[tuple[int, str], Tensor] = {}
        self._slabs = HostSlabs(pinned=device != "cpu")
        self._lent_until: tuple[threading.Event, float] | None = None
        parts = distributed_parts(optimizer)
        pairs = [pair for part in parts for pair in _masters_and_weights(part)]
        self._masters = [master for master, _ in pairs]
        self._weights = {id(master): weights for master, weights in pairs}
        self.store()
        for part in parts:
            part.optimizer.step = partial(self._step, part.optimizer)
            # Megatron would bring every master to the device once more, to write the weights that `_fetched` has
            # written. Weights without a master are updated in place.
            part._copy_main_params_to_model_params = _nothing_left_to_copy

    def store(self) -> None:
        """Move masters and moments to the host, wherever they are: at first, and after a checkpoint was loaded."""
        for master in self._masters:
            master.data = self._at_home(master, "master", master.data)
        for parameter, state in parameter_states(self._optimizer):
            self._store_moments(parameter, state)

    def lend_homes(self, written: threading.Event, timeout_s: float) -> list[Tensor]:
        """Return the memory of masters and moments, which does not change until `written` is set.

        The next update waits for it, at most `timeout_s`.
        """
        self._lent_until = written, timeout_s
        return list(self._homes.values())

    def _wait_until_written(self) -> None:
        if self._lent_until is None:
            return
        written, timeout_s = self._lent_until
        if not written.wait(timeout_s):
            raise WaitTimeout(
                "the checkpoint to write the offloaded optimizer, which the next update changes",
                timeout_s,
                "Is the disk of runs_dir full or stuck? Raise trainer.checkpoint.timeout_s if it is only slow",
            )
        self._lent_until = None

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Masters can be given gradients of the device within the block, for an update: they have stand-ins there,
        which take no memory. Raises WaitTimeout if a checkpoint does not finish reading their homes."""
        self._wait_until_written()
        for master in self._masters:
            master.data = torch.empty(1, dtype=master.dtype, device=self._device).expand(master.shape)
        try:
            yield
        finally:
            for master in self._masters:
                master.grad = None
                master.data = self._homes[id(master), "master"]

    def _step(self, inner: Any) -> None:
        """The step of an optimizer of torch's kind, one parameter after the other."""
        groups = inner.param_groups
        try:
            for group in groups:
                counted = group
                for parameter in group["params"]:
                    # A copy each time: fused optimizers count the steps of a group, which this is only once.
                    counted = {
                        name: value.clone() if torch.is_tensor(value) else value for name, value in group.items()
                    }
                    inner.param_groups = [counted | {"params": [parameter]}]
                    with self._fetched(parameter, inner.state[parameter]):
                        type(inner).step(inner)
                    counted = inner.param_groups[0]
                group.update(counted | {"params": group["params"]})
        finally:
            inner.param_groups = groups

    @contextmanager
    def _fetched(self, parameter: Tensor, state: dict[str, Tensor]) -> Iterator[None]:
        """Master and moments of one parameter are on the device within the block; its weights follow them."""
        home = self._homes[id(parameter), "master"] if id(parameter) in self._weights else None
        if home is not None:
            parameter.data = self._at_device(home)
        state.update({name: self._at_device(state[name]) for name in _MOMENTS if name in state})
        yield
        self._store_moments(parameter, state)
        if home is not None:
            self._weights[id(parameter)].copy_(parameter.data)
            parameter.grad = None
            parameter.data = home.copy_(parameter.data)

    def _store_moments(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        state.update({name: self._at_home(parameter, name, state[name]) for name in _MOMENTS if name in state})

    def _at_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, copy=True, non_blocking=True)

    def _at_home(self, owner: Tensor, name: str, tensor: Tensor) -> Tensor:
        """Page-locked where there is a device to copy from, and allocated once."""
        home = self._homes.get((id(owner), name))
        if home is None:
            home = self._homes[id(owner), name] = self._slabs.empty(tensor.shape, tensor.dtype)
        if home is not tensor:
            home.copy_(tensor)
        return home


def _masters_and_weights(part: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (fp32 master, the part of the model's weights that it is the master of), both of one dimension."""
    for masters, parameters in zip(part.shard_fp32_from_float16_groups, part.model_float16_groups, strict=True):
        for master, parameter in zip(masters, parameters, strict=True):
            of_rank = part._get_model_param_range_map(parameter)["param"]
            yield master, parameter.detach().view(-1)[of_rank.start : of_rank.end]


def _nothing_left_to_copy() -> None:
    """Takes the place of Megatron's copy of masters into weights."""


def distributed_parts(optimizer: Any) -> list[Any]:
    """Megatron's distributed optimizers, of which experts have one of their own."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def parameter_states(optimizer: Any) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield (parameter shard, its AdamW state) of this rank."""
    for part in distributed_parts(optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, part.optimizer.state.get(parameter, {})


def make_storable(optimizer: Any) -> None:
    """Prepare the optimizer for Megatron's `sharded_state_dict`, to store or to load.

    torch's AdamW makes its state in the first step, and it is needed before. Megatron's own form of the state of the
    parameters would gather it on one rank.
    """
    for part in distributed_parts(optimizer):
        part.sharded_param_state_fully_reshardable = MethodType(sharded_optimizer_state, part)
        if not isinstance(part.optimizer, torch.optim.AdamW):
            continue
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                if not state:
                    moments = {name: torch.zeros_like(parameter.data) for name in _MOMENTS}
                    state.update(step=torch.tensor(0.0), **moments)


def load_state(optimizer: Any, state: dict[str, Any]) -> None:
    """Load what Megatron's `sharded_state_dict` was filled with, adapted to torch's AdamW.

    Megatron's and MindSpeed's `load_state_dict` see the groups alone: neither knows our form of the state of the
    parameters.
    """
    parts = distributed_parts(optimizer)
    loaded = [of_part.pop("param_state") for of_part in states_of_parts(state)]
    optimizer.load_state_dict(state)
    for part, of_parameters in zip(parts, loaded, strict=True):
        restore_optimizer_state(part, of_parameters)
        if isinstance(part.optimizer, torch.optim.AdamW):
            for kept in part.optimizer.state.values():
                # Loading gives all parameters one `step` tensor, which AdamW would then raise once per parameter.
                kept["step"] = kept["step"].clone()


def states_of_parts(state: dict[Any, Any]) -> list[dict[str, Any]]:
    """Split what Megatron's `sharded_state_dict` returns by distributed optimizer; it numbers several."""
    return [state] if "param_state" in state else [state[number] for number in sorted(state)]


def learning_rate(config: OptimizerConfig, version: int, steps: int) -> float:
    """The learning rate of the step `version` -> `version + 1` in a run of `steps` steps.

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
