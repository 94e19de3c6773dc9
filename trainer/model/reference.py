"""The reference model, from which the KL divergence is measured.

    frozen   the first policy of the run, or another checkpoint; never changes
    synced   the same, replaced by the policy's own weights at every version that is a multiple of `sync_every`

Where its weights are (`placement`):

    swap     in CPU memory, exchanged with the policy's, piece by piece, for each pass and back after it
             (`host_exchange`). The policy's weights come back bit for bit. The optimizer's fp32 masters are not touched
             where they are tensors of their own; where the weights are their own masters (float32) they are exchanged
             with them, and no update happens in between
    model    in a second model of the same layout, beside the policy, built from the reference's own config.json

Where adapters are trained (`model.lora`), `swap` holds and exchanges them alone. The first ones add nothing, so a
frozen reference is the first policy.

A synced reference is part of a checkpoint (`state_dict`, `load_state_dict`). A frozen one is not: a resumed run loads
it from where it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from async_grpo.config import RunConfig
from trainer.model.builder import build_model
from trainer.model.checks import check_reference_config
from trainer.model.hf_folder import SafetensorsFolder, read_config
from trainer.model.hf_weights import load_hf
from trainer.model.host_exchange import HostExchange
from trainer.model.policy import Policy
from trainer.platform import Platform

PREFIX = "reference."
"""Prefix of the reference's names in a checkpoint."""


class Placement(Protocol):
    """Where the reference's weights are."""

    def active(self) -> AbstractContextManager[Policy]:
        """Give a policy that computes with them, within the block."""
        ...

    def follow(self, policy: Policy) -> None:
        """Take over the policy's present weights."""
        ...

    def state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Return copies of them, as Megatron's sharded tensors of this rank."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load them from what `state_dict` was filled with."""
        ...


@dataclass(frozen=True, slots=True)
class Reference:
    """The reference's weights, and when they change. All calls are collective."""

    weights: Placement
    sync_every: int | None = None

    def active(self) -> AbstractContextManager[Policy]:
        """Give a policy that computes with the reference's weights, within the block, for forward passes only."""
        return self.weights.active()

    def after_step(self, policy: Policy, version: int) -> None:
        """Follow the policy, which has become `version`, if it is due."""
        if self.sync_every is not None and version % self.sync_every == 0:
            self.weights.follow(policy)

    def state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint must hold; {} if it never changes. `metadata`: of Megatron's sharded tensors."""
        return {} if self.sync_every is None else self.weights.state_dict(metadata)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` gave."""
        if self.sync_every is not None:
            self.weights.load_state_dict(state)


def load_reference(config: RunConfig, policy: Policy, first: Path, platform: Platform) -> Reference | None:
    """Load the reference model, None without one; call it while `policy` has the weights of `first`.

    Raises ConfigError.
    """
    wanted = config.trainer.reference
    if wanted.source == "none":
        return None
    folder = wanted.path or first
    hf = read_config(folder)
    check_reference_config(policy.hf, hf, wanted, folder)
    weights: Placement
    if wanted.placement == "model":
        model = build_model(hf, platform, policy.dtype, config.trainer)
        model.requires_grad_(False)
        inner = Float16Module(model.config, model) if policy.dtype == torch.bfloat16 else model
        weights = SecondModel(
            replace(policy, hf=hf, model=model, wrapped=inner, optimizer=None, offload=None, adapters=None)
        )
        load_hf(model, hf, SafetensorsFolder(folder))
    else:
        weights = SwappedWeights(policy)
        if folder != first:
            with weights.active():
                load_hf(policy.model, policy.hf, SafetensorsFolder(folder))
    return Reference(weights, wanted.sync_every)


class SwappedWeights:
    """The reference's weights in CPU memory, exchanged with the policy's for each pass."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._parameters = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
        self._held = HostExchange(self._parameters, policy.device)

    @contextmanager
    def active(self) -> Iterator[Policy]:
        self._exchange()
        try:
            yield self._policy
        finally:
            self._exchange()

    def follow(self, policy: Policy) -> None:
        self._held.store()

    def state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        numbers = {parameter.data_ptr(): number for number, parameter in enumerate(self._parameters)}
        state = self._policy.sharded_state(metadata, PREFIX)
        return _with_data(state, lambda parameter: self._held.copy_of(numbers[parameter.data_ptr()]))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self.active() as policy:
            policy.load_sharded_state(_without_prefix(state))

    def _exchange(self) -> None:
        self._policy.reading.wait()
        self._held.exchange()


class SecondModel:
    """The reference's weights in a second model; its `policy` has no optimizer."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @contextmanager
    def active(self) -> Iterator[Policy]:
        yield self.policy

    @torch.no_grad()
    def follow(self, policy: Policy) -> None:
        for mine, theirs in zip(self.policy.model.parameters(), policy.model.parameters(), strict=True):
            mine.copy_(theirs)

    def state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        return _with_data(self.policy.model.sharded_state_dict(prefix=PREFIX, metadata=metadata), Tensor.clone)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy.model.load_state_dict(_without_prefix(state))


def _with_data(state: dict[str, Any], copy_of: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Sharded tensors of parameters, with a copy in the place of each: what is written in the background must not
    change with the next exchange."""
    for sharded in state.values():
        if isinstance(sharded, ShardedTensor | ShardedTensorFactory) and sharded.data is not None:
            sharded.data = copy_of(sharded.data.detach())
    return state


def _without_prefix(state: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(PREFIX): value for name, value in state.items()}
