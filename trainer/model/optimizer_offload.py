"""Keeps the optimizer's fp32 masters and moments in host memory, 12 bytes per parameter of this rank.

                            master                         moments           gradient
    between updates         host                           host              none
    in `on_device`          placeholder without memory     host              device, in master.grad
    while P is updated      P: device; others as above     P: device         device
    P is updated            P: host                        host              none

The device has the masters and moments of one parameter P at a time. Its new weights are written from there, so the
results equal those without offloading. float32 weights are their own masters and stay on the device. Megatron's own
offloading computes AdamW on the CPU, which rounds differently.

A checkpoint writes the host tensors directly, because a copy would double them. The next update waits until they are
written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from async_grpo.errors import WaitTimeout
from trainer.model.host_slabs import HostSlabs
from trainer.model.optimizer_state import MOMENTS, distributed_optimizers, parameter_states


class StateOffload:
    """Moves masters and moments to host memory, and replaces the step of `optimizer` by one parameter at a time."""

    def __init__(self, optimizer: Any, device: str) -> None:
        self._optimizer = optimizer
        self._device = device
        self._host_tensors: dict[tuple[int, str], Tensor] = {}
        """(id of the parameter, "master" or name of the moment) -> its host memory."""
        self._slabs = HostSlabs(pinned=device != "cpu")
        self._checkpoint_wait: tuple[threading.Event, float] | None = None
        """Event that a checkpoint has been written, and the timeout of the wait for it."""

        parts = distributed_optimizers(optimizer)
        masters_and_weights = [pair for part in parts for pair in _masters_and_weights(part)]
        self._masters = [master for master, _ in masters_and_weights]
        self._weights_of_master = {id(master): weights for master, weights in masters_and_weights}
        self.move_to_host()
        for part in parts:
            part.optimizer.step = partial(self._step_by_parameter, part.optimizer)
            # Megatron would copy every master to the device again, to write the weights that `_on_device` has already
            # written. Weights without a master are updated in place.
            part._copy_main_params_to_model_params = _skip_weight_copy

    def move_to_host(self) -> None:
        """Move masters and moments to host memory. Call it again after a checkpoint was loaded."""
        for master in self._masters:
            master.data = self._copy_to_host(master, "master", master.data)
        for parameter, state in parameter_states(self._optimizer):
            self._move_moments_to_host(parameter, state)

    def lend_host_tensors(self, written: threading.Event, timeout_s: float) -> list[Tensor]:
        """Return the host tensors for a checkpoint. They do not change until `written` is set.

        The next update waits for it, for at most `timeout_s`.
        """
        self._checkpoint_wait = written, timeout_s
        return list(self._host_tensors.values())

    def _wait_for_checkpoint(self) -> None:
        if self._checkpoint_wait is None:
            return
        written, timeout_s = self._checkpoint_wait
        if not written.wait(timeout_s):
            raise WaitTimeout(
                "the checkpoint to write the offloaded optimizer, which the next update changes",
                timeout_s,
                "Is the disk of runs_dir full or stuck? Raise trainer.checkpoint.timeout_s if it is only slow",
            )
        self._checkpoint_wait = None

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Within the block masters accept gradients on the device, for one update.

        torch accepts a gradient only on the device of its parameter, so masters are replaced by placeholders there.
        Raises WaitTimeout if a checkpoint is still writing the host tensors.
        """
        self._wait_for_checkpoint()
        for master in self._masters:
            # One element, expanded: the right shape without its memory.
            master.data = torch.empty(1, dtype=master.dtype, device=self._device).expand(master.shape)
        try:
            yield
        finally:
            for master in self._masters:
                master.grad = None
                master.data = self._host_tensors[id(master), "master"]

    def _step_by_parameter(self, inner: Any) -> None:
        """Step torch's optimizer `inner` with one parameter at a time in its groups."""
        groups = inner.param_groups
        try:
            for group in groups:
                stepped = group
                for parameter in group["params"]:
                    # Fused optimizers count steps in the group. Step a copy of the original group each time, so that
                    # one update increases the count only once, whatever the number of parameters.
                    group_copy = {
                        name: value.clone() if torch.is_tensor(value) else value for name, value in group.items()
                    }
                    inner.param_groups = [group_copy | {"params": [parameter]}]
                    with self._on_device(parameter, inner.state[parameter]):
                        # `inner.step` is this method.
                        type(inner).step(inner)
                    stepped = inner.param_groups[0]
                group.update(stepped | {"params": group["params"]})
        finally:
            inner.param_groups = groups

    @contextmanager
    def _on_device(self, parameter: Tensor, state: dict[str, Tensor]) -> Iterator[None]:
        """Move the master and moments of a parameter to the device for the block; then write its weights."""
        has_master = id(parameter) in self._weights_of_master
        host_master = self._host_tensors[id(parameter), "master"] if has_master else None
        if host_master is not None:
            parameter.data = self._copy_to_device(host_master)
        state.update({name: self._copy_to_device(state[name]) for name in MOMENTS if name in state})
        yield
        self._move_moments_to_host(parameter, state)
        if host_master is not None:
            self._weights_of_master[id(parameter)].copy_(parameter.data)
            parameter.grad = None
            parameter.data = host_master.copy_(parameter.data)

    def _move_moments_to_host(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        state.update({name: self._copy_to_host(parameter, name, state[name]) for name in MOMENTS if name in state})

    def _copy_to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, copy=True, non_blocking=True)

    def _copy_to_host(self, owner: Tensor, name: str, tensor: Tensor) -> Tensor:
        """Copy `tensor` into its host memory, which is allocated once, and return that."""
        host_tensor = self._host_tensors.get((id(owner), name))
        if host_tensor is None:
            host_tensor = self._slabs.allocate_tensor(tensor.shape, tensor.dtype)
            self._host_tensors[id(owner), name] = host_tensor
        if host_tensor is not tensor:
            host_tensor.copy_(tensor)
        return host_tensor


def _masters_and_weights(part: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (fp32 master, the range of the model's weights that it is the master of), both flat."""
    for masters, parameters in zip(part.shard_fp32_from_float16_groups, part.model_float16_groups, strict=True):
        for master, parameter in zip(masters, parameters, strict=True):
            own_range = part._get_model_param_range_map(parameter)["param"]
            yield master, parameter.detach().view(-1)[own_range.start : own_range.end]


def _skip_weight_copy() -> None:
    """Replacement of Megatron's copy of masters into weights."""
