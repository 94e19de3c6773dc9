"""The slots of the sender's store, which all ranks fill: those on its node in place, the others through rank 0.

    rank on the node of rank 0  --HostCopy-------------------> slot
    rank on another node        --HostCopy, ShardStream--> rank 0 --> slot

All of it happens in the threads that copy, one on each rank, which alone talk to each other: no rank waits for another
in its training.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from async_grpo.weights.sender import WeightSender
from async_grpo.weights.store import WeightStore
from trainer.model.hf_weights import find_positions
from trainer.model.host_copy import HostCopy
from trainer.model.policy import Policy
from trainer.model.shards import RankShard, assign_shards
from trainer.ranks.distributed import broadcast_bytes, gather_ints, is_leader
from trainer.ranks.link import RankLink, RankListener, try_connect
from trainer.shard_stream import ShardStream


class SharedSlots:
    """The slots, and this rank's part in filling them. All ranks make it together."""

    def __init__(self, policy: Policy, sender: WeightSender | None, timeout_s: float, stream: Any) -> None:
        """`sender`: on rank 0, whose store it is. `stream`: `Platform.background_stream`."""
        self._shape, self._sender = policy.shape, sender
        store = Path(broadcast_bytes(bytes(sender.store) if sender else None).decode())
        self._local, self._link = connect_local_ranks(store.parent, timeout_s)
        self._shards = assign_shards(policy.hf, find_positions(), self._local)
        self._apart = [rank for rank, shards in enumerate(self._shards) if shards and rank not in self._local]
        self._stream = ShardStream(self._apart, timeout_s) if self._apart else None
        self._copy = HostCopy(policy.device, stream)
        self._parameters = dict(policy.model.named_parameters())
        if dist.get_rank() in self._local:
            self._tensors = _slots_of(store, policy.dtype)

    def allow(self) -> None:
        """What is queued on the device up to now comes before the next `publish`: the update of the weights."""
        self._copy.allow()

    def publish(self, version: int) -> None:
        """Bring the shards of this rank into a slot; on rank 0, also give the slot, and commit it when all are there.

        Raises WaitTimeout and NodeLost for ranks that do not do their part, and what the sender raises.
        """
        try:
            self._bring_shards(version)
        except BaseException as error:
            if self._sender is None and self._link.ranks:
                # This rank may wait for rank 0 in its training, and rank 0 for the shards: it has to raise the error.
                self._link.send_failure(0, version, error)
            raise

    def close(self) -> None:
        """Close the connections to other ranks. Safe to call twice."""
        self._link.close()

    def _bring_shards(self, version: int) -> None:
        rank = dist.get_rank()
        own = self._shards[rank]
        if self._sender is not None:
            slot = self._sender.begin_version(version)
            for other in self._link.ranks:
                self._link.send(other, version, slot)
            self._fill(own, slot)
            for other in self._apart:
                self._receive(other, slot)
            self._link.receive(self._link.ranks, version, "the shards")
            self._sender.commit_version()
        elif rank in self._local:
            slot = self._link.receive([0], version, "a slot")[0]
            self._fill(own, slot)
            self._link.send(0, version, rank)
        elif self._stream is not None and own:
            sources = (source for shard in own for source in shard.parameter_views(self._parameters, self._shape))
            self._stream.send(sources, self._copy)

    def _fill(self, shards: Sequence[RankShard], slot: int) -> None:
        """Copy the shards of this rank into their places."""
        shape, full, parameters = self._shape, self._tensors[slot], self._parameters
        self._copy.run(
            pair
            for shard in shards
            for pair in zip(shard.tensor_views(full, shape), shard.parameter_views(parameters, shape), strict=True)
        )

    def _receive(self, rank: int, slot: int) -> None:
        """Put the shards of a rank on another node into their places."""
        assert self._stream is not None
        full = self._tensors[slot]
        shards = self._shards[rank]
        self._stream.receive(rank, (target for shard in shards for target in shard.tensor_views(full, self._shape)))


def connect_local_ranks(folder: Path, timeout_s: float) -> tuple[list[int], RankLink]:
    """The ranks on the machine of rank 0, and the connections of this rank to them; all ranks call it together.

    `folder`: of the store on the machine of rank 0. `timeout_s`: for every message. Raises WaitTimeout.
    """
    rank = dist.get_rank()
    listener = RankListener(folder, dist.get_world_size()) if is_leader() else None
    try:
        path = Path(broadcast_bytes(bytes(listener.path) if listener is not None else None).decode())
        to_leader = try_connect(path, rank) if listener is None else None
        is_local = int(listener is not None or to_leader is not None)
        local = [number for number, (shares,) in enumerate(gather_ints([is_local])) if shares]
        if listener is not None:
            return local, RankLink(listener.accept_ranks(local[1:]), timeout_s)
        return local, RankLink({0: to_leader} if to_leader is not None else {}, timeout_s)
    finally:
        if listener is not None:
            listener.close()


def _slots_of(store: Path, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """The tensors of both slots, by name."""
    shared = WeightStore.adopt(store)
    flat = [torch.frombuffer(shared.slot_memory(number), dtype=torch.uint8) for number in (0, 1)]
    return [
        {
            spec.name: slot[spec.offset : spec.offset + spec.nbytes].view(dtype).view(spec.shape)
            for spec in shared.layout.tensors
        }
        for slot in flat
    ]
