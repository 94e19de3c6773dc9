"""Copies the weights of all ranks into the sender's shared-memory store.

    rank on rank 0's machine    --HostCopy---------------------> slot
    rank on another machine     --HostCopy, ShardStream--> rank 0 --> slot

Runs in one background thread per rank. Only these threads talk to each other, so training never waits for another rank.

    rank 0:  begin a slot, announce it, copy own shards, receive remote shards, wait for local ranks, commit
    local:   wait for the slot number, copy own shards, report to rank 0
    remote:  stream own shards to rank 0
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from async_grpo.weights.sender import WeightSender
from async_grpo.weights.store import WeightStore
from trainer.model.hf_weights import gather_positions
from trainer.model.host_copy import HostCopy
from trainer.model.policy import Policy
from trainer.model.shards import assign_shards
from trainer.ranks.distributed import broadcast_bytes, gather_ints, is_rank_zero
from trainer.ranks.link import RankLink, RankListener, try_connect
from trainer.shard_stream import ShardStream


class SharedSlots:
    """The two slots of the store, and this rank's connections for filling them. All ranks create it together."""

    def __init__(self, policy: Policy, sender: WeightSender | None, timeout_s: float, stream: Any) -> None:
        """`sender`: on rank 0, which owns the store; None on the others. `stream`: `Platform.background_stream`."""
        self._shape = policy.shape
        self._sender = sender
        store = Path(broadcast_bytes(bytes(sender.store) if sender else None).decode())
        self._local_ranks, self._link = connect_local_ranks(store.parent, timeout_s)
        self._shards = assign_shards(policy.hf, gather_positions(), self._local_ranks)
        self._own_shards = self._shards[dist.get_rank()]
        self._remote_ranks = [
            rank for rank, shards in enumerate(self._shards) if shards and rank not in self._local_ranks
        ]
        self._stream = ShardStream(self._remote_ranks, timeout_s) if self._remote_ranks else None
        self._copy = HostCopy(policy.device, stream)
        self._parameters = dict(policy.model.named_parameters())
        self._is_local = dist.get_rank() in self._local_ranks
        if self._is_local:
            self._slots = _map_slots(store, policy.dtype)

    def record_update(self) -> None:
        """Make the next copy wait for the device work queued so far, which includes the weight update."""
        self._copy.record_update()

    def copy_version(self, version: int) -> None:
        """Copy this rank's shards of `version`; on rank 0 also open the slot, and commit it when it is complete.

        Raises WaitTimeout or NodeLost if another rank does not answer, and the errors of the sender.
        """
        try:
            if self._sender is not None:
                self._copy_as_rank_zero(self._sender, version)
            elif self._is_local:
                self._copy_as_local_rank(version)
            elif self._stream is not None and self._own_shards:
                self._stream_to_rank_zero(self._stream)
        except BaseException as error:
            if self._sender is None and self._link.ranks:
                # Report the failure to rank 0. This rank's training thread may be waiting for rank 0 in a collective
                # call, where it cannot raise the error, while rank 0 waits for these shards.
                self._link.send_failure(0, version, error)
            raise

    def close(self) -> None:
        """Close the connections to other ranks. Safe to call twice."""
        self._link.close()

    def _copy_as_rank_zero(self, sender: WeightSender, version: int) -> None:
        slot = sender.begin_version(version)

        # Announce the slot before copying: the other local ranks copy in parallel.
        for rank in self._link.ranks:
            self._link.send(rank, version, slot)
        self._copy_own_shards(slot)
        for rank in self._remote_ranks:
            self._receive_shards(rank, slot)

        # Commit only when every local rank has reported. An earlier commit would publish bytes of an older version
        # under the new version's number.
        self._link.receive(self._link.ranks, version, "the shards")
        sender.commit_version()

    def _copy_as_local_rank(self, version: int) -> None:
        slot = self._link.receive([0], version, "a slot")[0]
        self._copy_own_shards(slot)
        self._link.send(0, version, dist.get_rank())

    def _stream_to_rank_zero(self, stream: ShardStream) -> None:
        sources = (
            source for shard in self._own_shards for source in shard.parameter_views(self._parameters, self._shape)
        )
        stream.send(sources, self._copy)

    def _copy_own_shards(self, slot: int) -> None:
        tensors = self._slots[slot]
        self._copy.copy_to_host(
            pair
            for shard in self._own_shards
            for pair in zip(
                shard.tensor_views(tensors, self._shape),
                shard.parameter_views(self._parameters, self._shape),
                strict=True,
            )
        )

    def _receive_shards(self, rank: int, slot: int) -> None:
        """Receive the shards of a rank on another machine into the slot."""
        assert self._stream is not None
        tensors = self._slots[slot]
        targets = (target for shard in self._shards[rank] for target in shard.tensor_views(tensors, self._shape))
        self._stream.receive(rank, targets)


def connect_local_ranks(folder: Path, timeout_s: float) -> tuple[list[int], RankLink]:
    """Find the ranks on rank 0's machine and connect rank 0 with them. All ranks call it together.

    A rank is local if it can connect to a Unix socket of rank 0. That the store's path exists on a machine proves
    nothing: another run may have left a store of the same name there.

    `folder`: folder of the store on rank 0's machine. `timeout_s`: for each message. Returns the local ranks and this
    rank's connections. Raises WaitTimeout.
    """
    rank = dist.get_rank()
    listener = RankListener(folder, dist.get_world_size()) if is_rank_zero() else None
    try:
        path = Path(broadcast_bytes(bytes(listener.path) if listener is not None else None).decode())
        to_rank_zero = try_connect(path, rank) if listener is None else None
        is_local = listener is not None or to_rank_zero is not None
        local_ranks = [number for number, (local,) in enumerate(gather_ints([int(is_local)])) if local]
        if listener is not None:
            connections = listener.accept_ranks(local_ranks[1:])
        elif to_rank_zero is not None:
            connections = {0: to_rank_zero}
        else:
            connections = {}
        return local_ranks, RankLink(connections, timeout_s)
    finally:
        if listener is not None:
            listener.close()


def _map_slots(store: Path, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """Return the tensors of both slots by name, as views of shared memory."""
    shared = WeightStore.adopt(store)
    slots = []
    for number in (0, 1):
        flat = torch.frombuffer(shared.slot_memory(number), dtype=torch.uint8)
        tensors = {}
        for spec in shared.layout.tensors:
            tensors[spec.name] = flat[spec.offset : spec.offset + spec.nbytes].view(dtype).view(spec.shape)
        slots.append(tensors)
    return slots
