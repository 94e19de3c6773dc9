"""Exports new weights from the trainer, to the weight sender of rank 0.

    in shards     every rank --its own shards--> slot of the sender's store --when all are there--> commit
                  in a thread, beside the next step; whoever changes the weights waits for it (`Policy.reading`)
    gathered      all ranks --> rank 0 --> publish, where the ranks on its node do not have the whole model

With `model.lora` the adapters alone are exported, gathered, with the digest of the weights that they are for.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from async_grpo.config import RunConfig
from async_grpo.errors import WaitTimeout
from async_grpo.weights import make_sender
from async_grpo.weights.base import WeightSender
from async_grpo.weights.lora import DIGEST
from async_grpo.weights.manifest import layout_of
from async_grpo.weights.store import WeightStore
from trainer.coordinator import Coordinator
from trainer.distributed import broadcast_bytes, broadcast_ints, gather_ints, is_leader
from trainer.model.hf_weights import RankPosition, find_positions
from trainer.model.host_copy import HostCopy
from trainer.model.lora import adapter_shapes
from trainer.model.policy import Policy
from trainer.model.shards import local_replicas, own_shards
from trainer.model.weight_map import model_tensors


class WeightExporter:
    """Publishes versions of one epoch; the servers learn its address with the first of them. All calls are
    collective."""

    def __init__(self, policy: Policy, config: RunConfig, coordinator: Coordinator, epoch: int) -> None:
        self._policy = policy
        self._coordinator = coordinator
        self._announced = False
        self._sender: WeightSender | None = None
        if is_leader():
            layout = layout_of(_tensor_kinds(policy))
            self._sender = make_sender(config, layout, epoch)
        self._shards: SharedSlots | None = None
        if policy.adapters is None:
            store = Path(broadcast_bytes(bytes(self._sender.store) if self._sender else None).decode())
            local = [rank for rank, (sees,) in enumerate(gather_ints([store.exists()])) if sees]
            positions = find_positions()
            if local_replicas(positions, local):
                self._shards = SharedSlots(policy, store, positions, local, config.weights.update_timeout_s)

    def publish(self, version: int) -> None:
        """Weights first, then the version that tickets carry: they are there, or on their way.

        Raises what copying the version before has raised.
        """
        if self._shards is None:
            self._publish_gathered(version)
        else:
            self._publish_shards(self._shards, version)
        if self._sender is not None and not self._announced:
            self._coordinator.set_publisher(self._sender.address)
        self._announced = True
        self._coordinator.publish_version(version)

    def close(self) -> None:
        """End the sender, after the version that is being copied."""
        try:
            self._policy.reading.wait()
        finally:
            if self._shards is not None:
                self._shards.close()
            if self._sender is not None:
                self._sender.close()

    def _publish_gathered(self, version: int) -> None:
        if self._sender is not None:
            self._sender.publish(version, _arrays(self._policy))
            return
        for _ in self._policy.export_trained():
            pass  # this rank's part of the gathering

    def _publish_shards(self, shards: SharedSlots, version: int) -> None:
        self._policy.reading.wait()
        (slot,) = broadcast_ints([self._sender.begin(version)] if self._sender else None, 1)
        if not shards.is_local:
            return
        shards.host_copy.allow()

        def copy() -> None:
            shards.fill(slot)
            if self._sender is None:
                shards.tell(version)
            else:
                shards.wait_for_others(version)
                self._sender.commit()

        if self._announced and self._policy.device.type in ("cpu", "cuda"):
            self._policy.reading.start(copy)
        else:
            copy()


class SharedSlots:
    """The slots of the sender's store, which the ranks on its node fill together. All ranks make it together."""

    def __init__(
        self, policy: Policy, store: Path, positions: Sequence[RankPosition], local: Sequence[int], timeout_s: float
    ) -> None:
        self._hf, self._timeout_s, self._local = policy.hf, timeout_s, local
        if self.is_local:
            self.host_copy = HostCopy(policy.device)
            self._shards = list(own_shards(policy.model, policy.hf, positions, dist.get_rank(), local))
            self._tensors = _slots_of(store, policy.dtype)
        own = bytes(store.with_name(f"all-{os.getpid()}"))  # short: a socket's path has 107 bytes at most
        self._path = Path(broadcast_bytes(own if is_leader() else None).decode())
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(timeout_s)
        if is_leader():
            self._path.unlink(missing_ok=True)
            self._socket.bind(str(self._path))
        dist.barrier()  # before anybody sends to it

    @property
    def is_local(self) -> bool:
        """Whether this rank is on the node of the store."""
        return dist.get_rank() in self._local

    def fill(self, slot: int) -> None:
        """Copy the shards of this rank."""
        full = self._tensors[slot]
        self.host_copy.run(pair for shard in self._shards for pair in shard.pairs(full, self._hf))

    def tell(self, version: int) -> None:
        """Tell rank 0 that the shards of this rank are in the slot. Raises WaitTimeout if it does not listen."""
        try:
            self._socket.sendto(f"{version} {dist.get_rank()}".encode(), str(self._path))
        except TimeoutError:
            raise WaitTimeout(f"rank 0 to hear of the shards of version {version}", self._timeout_s) from None

    def wait_for_others(self, version: int) -> None:
        """Wait, on rank 0, until the shards of all other ranks are in the slot. Raises WaitTimeout."""
        missing, deadline = set(self._local) - {dist.get_rank()}, time.monotonic() + self._timeout_s
        while missing:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                told, rank = map(int, self._socket.recv(64).split())
            except TimeoutError:
                who = f"the shards of ranks {sorted(missing)} of version {version}"
                raise WaitTimeout(who, self._timeout_s) from None
            if told == version:
                missing.discard(rank)

    def close(self) -> None:
        """Close the socket. Safe to call twice."""
        self._socket.close()
        if is_leader():
            self._path.unlink(missing_ok=True)


def _slots_of(store: Path, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """The tensors of both slots, by name."""
    shared = WeightStore.adopt(store)
    flat = [torch.frombuffer(shared.slot(number), dtype=torch.uint8) for number in (0, 1)]
    return [
        {
            spec.name: slot[spec.offset : spec.offset + spec.nbytes].view(dtype).view(spec.shape)
            for spec in shared.layout.tensors
        }
        for slot in flat
    ]


def _tensor_kinds(policy: Policy) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of every tensor that is published."""
    dtype = str(policy.dtype).removeprefix("torch.")
    if policy.adapters is not None:
        adapters = adapter_shapes(policy.hf, policy.adapters.config)
        return [(DIGEST, "uint8", (len(policy.adapters.base),)), *((name, dtype, shape) for name, shape in adapters)]
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    return [(name, dtype, shape) for name, shape in model_tensors(policy.hf, stages)]


def _arrays(policy: Policy) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """No copies; bfloat16, which numpy does not know, as raw uint16."""
    if policy.adapters is not None:
        yield DIGEST, np.frombuffer(policy.adapters.base, np.uint8)
    for name, tensor in policy.export_trained():
        raw = tensor.contiguous()
        yield name, raw.view(torch.int16).numpy().view(np.uint16) if raw.dtype == torch.bfloat16 else raw.numpy()
