"""Copies of a rank's tensors into host memory, overlapping the work of the device.

    tensor --side stream--> one of two page-locked buffers --this thread--> host memory

A direct copy into memory that is not page-locked goes through small buffers of the driver and keeps its stream busy
until it ends. On the training's stream, the next step's kernels would wait for it. Only the two buffers are
page-locked: page-locking the memory that all ranks share would take each rank seconds.

The host polls events with `query`. The device does not wait for them, and the host does not call `synchronize`. On an
NPU the stream launches its copies immediately (`NpuPlatform.background_stream`). A wait on it could be launched before
the event that the training has queued, and `synchronize` would first empty the training's queue of operators.
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
"""Seconds between two queries of an event. Filling a buffer takes about 3 ms at 25 GB/s."""
CopyPair = tuple[Tensor, Tensor]
"""(target on the host, source)."""


class HostCopy:
    """Copies tensors of one device. `record_update` and `copy_to_host` may be called by different threads."""

    def __init__(self, device: torch.device, stream: Any, buffer_bytes: int = BUFFER_BYTES) -> None:
        """`stream`: `Platform.background_stream`; None on the CPU, where no buffers are needed."""
        self._stream = stream
        self._buffer_bytes = buffer_bytes
        self._torch: Any = None if stream is None else getattr(torch, device.type)
        if self._torch is not None:
            self._device_index = self._torch.current_device()
            self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._update_event: Any = None

    def record_update(self) -> None:
        """Make the next copy wait for the device work queued so far (the weight update)."""
        if self._torch is not None:
            self._update_event = self._torch.current_stream().record_event()

    @torch.no_grad()
    def copy_to_host(self, pairs: Iterable[CopyPair]) -> None:
        """Copy every source into its target, which has its shape and dtype. All copies are complete on return."""
        if self._torch is None:
            for target, source in pairs:
                target.copy_(source)
            return
        # The current device is a setting of each thread: without this, the background thread would use device 0.
        self._torch.set_device(self._device_index)
        _wait_for_event(self._update_event)
        with self._torch.stream(self._stream):
            self._copy_through_buffers(
                piece for pair in pairs for piece in split_into_pieces(*pair, self._buffer_bytes)
            )

    def _copy_through_buffers(self, pieces: Iterable[CopyPair]) -> None:
        in_flight: deque[tuple[Tensor, Tensor, Any]] = deque()
        for number, (target, source) in enumerate(pieces):
            if len(in_flight) == len(self._buffers):
                _empty_buffer(*in_flight.popleft())
            buffer = self._buffers[number % len(self._buffers)][: source.nbytes]
            staged = buffer.view(source.dtype).view(source.shape)
            staged.copy_(source, non_blocking=True)
            in_flight.append((target, staged, self._stream.record_event()))
        while in_flight:
            _empty_buffer(*in_flight.popleft())


def split_into_pieces(target: Tensor, source: Tensor, max_bytes: int) -> Iterator[CopyPair]:
    """Split a pair into pieces of at most `max_bytes`: rows of the first dimension whose rows are small enough."""
    if source.nbytes <= max_bytes:
        yield target, source
    elif rows := max_bytes // source[0].nbytes:
        yield from zip(target.split(rows), source.split(rows), strict=True)
    else:
        for row_pair in zip(target, source, strict=True):
            yield from split_into_pieces(*row_pair, max_bytes)


def _empty_buffer(target: Tensor, staged: Tensor, is_filled: Any) -> None:
    _wait_for_event(is_filled)
    target.copy_(staged)


def _wait_for_event(event: Any) -> None:
    while not event.query():
        time.sleep(POLL_S)
