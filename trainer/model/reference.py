"""The reference model of the KL divergence.

    frozen   the first policy of the run, or another checkpoint; never changes
    synced   starts as above; gets the policy's weights at every version that is a multiple of `sync_every`

Location of its weights (`placement`):

    swap     host memory, exchanged with the policy's weights for each pass and back afterwards (`host_exchange`). The
             policy's weights return bit for bit. bfloat16 weights have separate fp32 masters, which are not touched.
             float32 weights are their own masters and are exchanged too; no update happens in between
    model    a second model with the same layout, next to the policy, built from the reference's own config.json

With adapters (`model.lora`), `swap` stores and exchanges only the adapters. The initial adapters add nothing, so a
frozen reference equals the first policy.

A synced reference is part of a checkpoint (`state_dict`, `load_state_dict`). A frozen one is not: a resumed run loads
it from its original folder.
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
from trainer.model.hf_weights import load_hf_tensors
from trainer.model.host_exchange import HostExchange
from trainer.model.policy import Policy
from trainer.platform import Platform

PREFIX = "reference."
"""Prefix of the reference's names in a checkpoint."""


class Placement(Protocol):
    """Storage of the reference's weights."""

    def activate_weights(self) -> AbstractContextManager[Policy]:
        """Return a context with a policy that computes with these weights."""
        ...

    def copy_policy_weights(self, policy: Policy) -> None:
        """Replace the weights by the policy's current weights."""
        ...

    def state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Return copies of the weights as Megatron's sharded tensors of this rank."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the weights from a filled `state_dict`."""
        ...


@dataclass(frozen=True, slots=True)
class Reference:
    """The reference's weights and their sync interval. All calls are collective."""

    weights: Placement
    sync_every: int | None = None
    """Number of versions between two syncs; None for a frozen reference."""

    def activate_weights(self) -> AbstractContextManager[Policy]:
        """Return a context with a policy that computes with the reference's weights. Forward passes only."""
        return self.weights.activate_weights()

    def sync_after_step(self, policy: Policy, version: int) -> None:
        """Copy the policy's weights if a sync is due at `version`, the policy's new version."""
        if self.sync_every is not None and version % self.sync_every == 0:
            self.weights.copy_policy_weights(policy)

    def state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Return the state for a checkpoint; {} for a frozen reference. `metadata`: for Megatron's sharded tensors."""
        return {} if self.sync_every is None else self.weights.state_dict(metadata)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the weights from a filled `state_dict`."""
        if self.sync_every is not None:
            self.weights.load_state_dict(state)


def load_reference(config: RunConfig, policy: Policy, first: Path, platform: Platform) -> Reference | None:
    """Load the reference model; None without one. Call it while `policy` has the weights of the folder `first`.

    Raises ConfigError.
    """
    settings = config.trainer.reference
    if settings.source == "none":
        return None
    folder = settings.path or first
    hf = read_config(folder)
    check_reference_config(policy.hf, hf, settings, folder)

    weights: Placement
    if settings.placement == "model":
        model = build_model(hf, platform, policy.dtype, config.trainer, fp32_head=config.model.fp32_head)
        model.requires_grad_(False)
        inner = Float16Module(model.config, model) if policy.dtype == torch.bfloat16 else model
        weights = SecondModel(
            replace(policy, hf=hf, model=model, wrapped=inner, optimizer=None, offload=None, adapters=None)
        )
        load_hf_tensors(model, hf, SafetensorsFolder(folder))
    else:
        weights = SwappedWeights(policy)
        if folder != first:
            with weights.activate_weights():
                load_hf_tensors(policy.model, policy.hf, SafetensorsFolder(folder))
    return Reference(weights, settings.sync_every)


class SwappedWeights:
    """The reference's weights in host memory, exchanged with the policy's weights for each pass."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._parameters = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
        self._host_copies = HostExchange(self._parameters, policy.device)

    @contextmanager
    def activate_weights(self) -> Iterator[Policy]:
        self._exchange()
        try:
            yield self._policy
        finally:
            self._exchange()

    def copy_policy_weights(self, policy: Policy) -> None:
        self._host_copies.save_tensors()

    def state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        indices = {parameter.data_ptr(): index for index, parameter in enumerate(self._parameters)}
        state = self._policy.sharded_state(metadata, PREFIX)
        return _copy_sharded_data(state, lambda parameter: self._host_copies.clone_saved(indices[parameter.data_ptr()]))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self.activate_weights() as policy:
            policy.load_sharded_state(_without_prefix(state))

    def _exchange(self) -> None:
        self._policy.reading.wait_until_read()
        self._host_copies.exchange_tensors()


class SecondModel:
    """The reference's weights in a second model; its `policy` has no optimizer."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @contextmanager
    def activate_weights(self) -> Iterator[Policy]:
        yield self.policy

    @torch.no_grad()
    def copy_policy_weights(self, policy: Policy) -> None:
        for target, source in zip(self.policy.model.parameters(), policy.model.parameters(), strict=True):
            target.copy_(source)

    def state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        state = self.policy.model.sharded_state_dict(prefix=PREFIX, metadata=metadata)
        return _copy_sharded_data(state, Tensor.clone)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy.model.load_state_dict(_without_prefix(state))


def _copy_sharded_data(state: dict[str, Any], copy_tensor: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Replace the data of sharded tensors by copies."""
    # The checkpoint is written in the background. Without copies the next exchange would change it meanwhile.
    for sharded in state.values():
        if isinstance(sharded, ShardedTensor | ShardedTensorFactory) and sharded.data is not None:
            sharded.data = copy_tensor(sharded.data.detach())
    return state


def _without_prefix(state: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(PREFIX): value for name, value in state.items()}
