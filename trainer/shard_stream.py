"""Streams the shards of ranks on other machines to rank 0, over a process group of the copying threads.

    parameter --HostCopy--> one of two buffers --gloo--> one of two buffers of rank 0 --copy--> tensor in the slot

Two buffers per end: while one piece is sent, the next one is copied.
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
from trainer.model.host_copy import BUFFER_BYTES, HostCopy, split_into_pieces


class ShardStream:
    """Sends tensors in pieces. Both ends compute the same pieces from the shapes. All ranks create it together."""

    def __init__(self, senders: Sequence[int], timeout_s: float) -> None:
        """`timeout_s`: maximum wait per piece, including the wait until rank 0 receives the first."""
        self._timeout_s = timeout_s
        self._group = dist.new_group([0, *senders], timeout=timedelta(seconds=timeout_s), backend="gloo")
        self._buffers: list[Tensor] = []

    def send(self, sources: Iterable[Tensor], copy: HostCopy) -> None:
        """Send all tensors to rank 0. Raises NodeLost if it does not receive them."""
        in_flight: deque[dist.Work | None] = deque()
        for piece, buffer in self._buffered(sources):
            # The buffer of this piece is free again once the piece before the previous one is sent.
            if len(in_flight) == 2:
                self._wait(in_flight.popleft(), 0)
            copy.copy_to_host([(buffer.view(piece.dtype).view(piece.shape), piece)])
            in_flight.append(dist.isend(buffer, 0, group=self._group))
        for work in in_flight:
            self._wait(work, 0)

    def receive(self, rank: int, targets: Iterable[Tensor]) -> None:
        """Receive all tensors from rank `rank`. Raises NodeLost if it does not send them."""
        in_flight: deque[tuple[dist.Work | None, Tensor, Tensor]] = deque()

        def finish_oldest() -> None:
            work, piece, buffer = in_flight.popleft()
            self._wait(work, rank)
            piece.copy_(buffer.view(piece.dtype).view(piece.shape))

        for piece, buffer in self._buffered(targets):
            if len(in_flight) == 2:
                finish_oldest()
            in_flight.append((dist.irecv(buffer, rank, group=self._group), piece, buffer))
        while in_flight:
            finish_oldest()

    def _buffered(self, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every piece with a part of equal size of one of the two buffers, alternating."""
        if not self._buffers:
            self._buffers = [torch.empty(BUFFER_BYTES, dtype=torch.uint8) for _ in range(2)]
        all_pieces = (piece for tensor in tensors for piece, _ in split_into_pieces(tensor, tensor, BUFFER_BYTES))
        for number, piece in enumerate(all_pieces):
            yield piece, self._buffers[number % 2][: piece.nbytes]

    def _wait(self, work: Any, rank: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise NodeLost(
                f"the transfer of weights between rank {rank} and rank {dist.get_rank()} failed "
                f"(weights.update_timeout_s is {self._timeout_s:g} s): {error}"
            ) from error
