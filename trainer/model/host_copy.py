"""Copies of a rank's tensors into memory of the host, beside the work of the device.

    tensor --side stream--> one of two page-locked buffers --this thread--> memory of the host

A copy that goes straight into memory that is not page-locked goes through the driver's own small buffers, and keeps its
stream busy until it has ended: on the stream of the training, the next step's kernels would wait for it. Only the
buffers are page-locked, not the memory that all ranks share, which would take each of them seconds.

Events are queried, not waited for by the device or by `synchronize`. The stream of an NPU is one whose copies are
launched at once (`NpuPlatform.background_stream`): a wait in it could be launched before the event that the training
has queued, and `synchronize` would first empty the queue of the training's operators.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

BUFFER_BYTES = 64 << 20
POLL_S = 2e-4
"""Seconds between two queries of an event. A buffer takes some 3 ms to fill, at 25 GB/s."""
CopyPair = tuple[Tensor, Tensor]
"""Target on the host, and source."""


class HostCopy:
    """Copies tensors of one device. `allow` and `run` may be called by different threads."""

    def __init__(self, device: torch.device, stream: Any, buffer_bytes: int = BUFFER_BYTES) -> None:
        """`stream`: `Platform.background_stream`; None copies plainly, on the CPU."""
        self._stream = stream
        self._buffer_bytes = buffer_bytes
        self._torch: Any = None if stream is None else getattr(torch, device.type)
        if self._torch is not None:
            self._index = self._torch.current_device()
            self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._settled: Any = None

    def allow(self) -> None:
        """What is queued on the training's stream up to now comes before the next `run`: the update of the weights."""
        if self._torch is not None:
            self._settled = self._torch.current_stream().record_event()

    @torch.no_grad()
    def run(self, pairs: Iterable[CopyPair]) -> None:
        """Copy every source into its target, which has its shape and dtype. All of it is there on return."""
        if self._torch is None:
            for target, source in pairs:
                target.copy_(source)
            return
        self._torch.set_device(self._index)  # of this thread, which would use device 0
        _wait_for(self._settled)
        with self._torch.stream(self._stream):
            self._through_buffers(piece for pair in pairs for piece in pieces(*pair, self._buffer_bytes))

    def _through_buffers(self, found: Iterable[CopyPair]) -> None:
        filling: deque[tuple[Tensor, Tensor, Any]] = deque()
        for number, (target, source) in enumerate(found):
            if len(filling) == len(self._buffers):
                _empty(*filling.popleft())
            buffer = self._buffers[number % len(self._buffers)][: source.nbytes]
            staged = buffer.view(source.dtype).view(source.shape)
            staged.copy_(source, non_blocking=True)
            filling.append((target, staged, self._stream.record_event()))
        while filling:
            _empty(*filling.popleft())


def pieces(target: Tensor, source: Tensor, most_bytes: int) -> Iterator[CopyPair]:
    """The pair in parts of at most `most_bytes`: whole rows of the first dimension that is small enough."""
    if source.nbytes <= most_bytes:
        yield target, source
    elif rows := most_bytes // source[0].nbytes:
        yield from zip(target.split(rows), source.split(rows), strict=True)
    else:
        for rest in zip(target, source, strict=True):
            yield from pieces(*rest, most_bytes)


def _empty(target: Tensor, staged: Tensor, filled: Any) -> None:
    _wait_for(filled)
    target.copy_(staged)


def _wait_for(event: Any) -> None:
    while not event.query():
        time.sleep(POLL_S)
