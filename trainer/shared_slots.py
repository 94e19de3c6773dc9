"""The slots of the sender's store, which all ranks fill: those on its node in place, the others through rank 0.

    rank on the node of rank 0  --HostCopy-------------------> slot
    rank on another node        --HostCopy, ShardStream--> rank 0 --> slot

All of it happens in the threads that copy, one on each rank, which alone talk to each other: no rank waits for another
in its training.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from async_grpo.errors import NodeLost, WaitTimeout
from async_grpo.weights.base import WeightSender
from async_grpo.weights.store import WeightStore
from trainer.distributed import broadcast_bytes, gather_ints, is_leader
from trainer.model.hf_weights import find_positions
from trainer.model.host_copy import HostCopy
from trainer.model.policy import Policy
from trainer.model.shards import RankShard, assign_shards
from trainer.shard_stream import ShardStream


class SharedSlots:
    """The slots, and this rank's part in filling them. All ranks make it together."""

    def __init__(self, policy: Policy, sender: WeightSender | None, timeout_s: float) -> None:
        """`sender`: on rank 0, whose store it is."""
        self._policy, self._sender, self._timeout_s = policy, sender, timeout_s
        store = Path(broadcast_bytes(bytes(sender.store) if sender else None).decode())
        self._local = ranks_that_see(store)
        self._shards = assign_shards(policy.hf, find_positions(), self._local)
        self._apart = [rank for rank, shards in enumerate(self._shards) if shards and rank not in self._local]
        self._stream = ShardStream(self._apart, timeout_s) if self._apart else None
        self._copy = HostCopy(policy.device)
        self._parameters = dict(policy.model.named_parameters())
        if self._is_local:
            self._tensors = _slots_of(store, policy.dtype)
        own = bytes(store.with_name(f"{os.getpid():x}"))  # short: a socket's path has 107 bytes at most
        self._path = broadcast_bytes(own if is_leader() else None).decode()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        if self._is_local:
            self._address(dist.get_rank()).unlink(missing_ok=True)
            self._socket.bind(str(self._address(dist.get_rank())))
        dist.barrier()  # before anybody sends to another

    def allow(self) -> None:
        """What is queued on the device up to now comes before the next `publish`: the update of the weights."""
        self._copy.allow()

    def publish(self, version: int) -> None:
        """Bring the shards of this rank into a slot; on rank 0, also give the slot, and commit it when all are there.

        Raises WaitTimeout and NodeLost for ranks that do not do their part, and what the sender raises.
        """
        own = self._shards[dist.get_rank()]
        if self._sender is not None:
            slot = self._sender.begin(version)
            for rank in self._others():
                self._send(rank, version, slot)
            self._fill(own, slot)
            for rank in self._apart:
                self._receive(rank, slot)
            self._wait_for_others(version)
            self._sender.commit()
        elif self._is_local:
            self._fill(own, self._next_about(version, f"rank 0 to have a slot for version {version}", self._deadline()))
            self._send(0, version, dist.get_rank())
        elif self._stream is not None and own:
            sources = (source for shard in own for source in shard.sources(self._parameters, self._policy.hf))
            self._stream.send(sources, self._copy)

    def close(self) -> None:
        """Close the socket. Safe to call twice."""
        self._socket.close()
        if self._is_local:
            self._address(dist.get_rank()).unlink(missing_ok=True)

    def _fill(self, shards: Sequence[RankShard], slot: int) -> None:
        """Copy the shards of this rank into their places."""
        hf, full = self._policy.hf, self._tensors[slot]
        self._copy.run(
            pair
            for shard in shards
            for pair in zip(shard.targets(full, hf), shard.sources(self._parameters, hf), strict=True)
        )

    def _receive(self, rank: int, slot: int) -> None:
        """Put the shards of a rank on another node into their places."""
        assert self._stream is not None
        full = self._tensors[slot]
        shards = self._shards[rank]
        self._stream.receive(rank, (target for shard in shards for target in shard.targets(full, self._policy.hf)))

    def _wait_for_others(self, version: int) -> None:
        missing, deadline = self._others(), self._deadline()
        while missing:
            waited_for = f"the shards of ranks {sorted(missing)} of version {version}"
            missing.discard(self._next_about(version, waited_for, deadline))

    @property
    def _is_local(self) -> bool:
        """Whether this rank is on the node of the store."""
        return dist.get_rank() in self._local

    def _others(self) -> set[int]:
        return set(self._local) - {0}

    def _address(self, rank: int) -> Path:
        return Path(f"{self._path}-{rank}")

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s

    def _send(self, rank: int, version: int, number: int) -> None:
        self._socket.settimeout(self._timeout_s)
        try:
            self._socket.sendto(f"{version} {number}".encode(), str(self._address(rank)))
        except TimeoutError:
            raise WaitTimeout(f"rank {rank} to hear of version {version}", self._timeout_s) from None
        except OSError as error:
            raise NodeLost(f"rank {rank} does not listen for version {version} any more: {error}") from None

    def _next_about(self, version: int, waited_for: str, deadline: float) -> int:
        """The number in the next message about this version."""
        while True:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                told, number = map(int, self._socket.recv(64).split())
            except TimeoutError:
                raise WaitTimeout(waited_for, self._timeout_s) from None
            if told == version:
                return number


def ranks_that_see(store: Path) -> list[int]:
    """The ranks on the machine of that file; all ranks ask together."""
    return [rank for rank, (sees,) in enumerate(gather_ints([store.exists()])) if sees]


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
