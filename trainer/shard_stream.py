"""The shards of ranks on other nodes, on their way to rank 0, over connections that only the copying threads use.

parameter --HostCopy--> one of two buffers --gloo--> one of two buffers of rank 0 --> its place in the slot
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from async_grpo.errors import NodeLost
from trainer.model.host_copy import BUFFER_BYTES, HostCopy, pieces


class ShardStream:
    """Sends tensors piece by piece, in their order, from which both ends know the pieces. All ranks make it
    together."""

    def __init__(self, senders: Sequence[int], timeout_s: float) -> None:
        """`timeout_s`: for every piece, and for the time until rank 0 takes the first."""
        self._timeout_s = timeout_s
        self._group = dist.new_group([0, *senders], timeout=timedelta(seconds=timeout_s), backend="gloo")
        self._buffers: list[Tensor] = []

    def send(self, sources: Iterable[Tensor], copy: HostCopy) -> None:
        """Send all of these to rank 0. Raises NodeLost if it does not take them."""
        under_way: deque[dist.Work | None] = deque()
        for piece, buffer in self._buffered(sources):
            if len(under_way) == 2:
                self._wait(under_way.popleft(), 0)
            copy.run([(buffer.view(piece.dtype).view(piece.shape), piece)])
            under_way.append(dist.isend(buffer, 0, group=self._group))
        for work in under_way:
            self._wait(work, 0)

    def receive(self, rank: int, targets: Iterable[Tensor]) -> None:
        """Fill all of these with what rank `rank` sends. Raises NodeLost if it does not."""
        under_way: deque[tuple[dist.Work | None, Tensor, Tensor]] = deque()

        def take() -> None:
            work, piece, buffer = under_way.popleft()
            self._wait(work, rank)
            piece.copy_(buffer.view(piece.dtype).view(piece.shape))

        for piece, buffer in self._buffered(targets):
            if len(under_way) == 2:
                take()
            under_way.append((dist.irecv(buffer, rank, group=self._group), piece, buffer))
        while under_way:
            take()

    def _buffered(self, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Every piece, with as many bytes of one of the two buffers in turn."""
        if not self._buffers:
            self._buffers = [torch.empty(BUFFER_BYTES, dtype=torch.uint8) for _ in range(2)]
        found = (piece for tensor in tensors for piece, _ in pieces(tensor, tensor, BUFFER_BYTES))
        for number, piece in enumerate(found):
            yield piece, self._buffers[number % 2][: piece.nbytes]

    def _wait(self, work: Any, rank: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise NodeLost(
                f"weights between rank {rank} and rank {dist.get_rank()} stopped on their way "
                f"(weights.update_timeout_s is {self._timeout_s:g} s): {error}"
            ) from error
