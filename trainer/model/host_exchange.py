"""Copies of tensors in host memory that can be exchanged with the tensors.

    tensor --1--> staging buffer --3--> page        1, 2  on the loading stream
    tensor <-----------2--------------- page        3     on the saving stream

Pages are page-locked, so both directions of the bus are busy at the same time, and this thread waits for neither. The
training's stream waits only for the loads: it may compute while the last pieces are still being saved.

torch rounds a page-locked allocation up to a power of two. With one allocation per tensor that would take a third more
memory on average. So the size of a page is a power of two, and a tensor may start in one page and end in another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.platform.memory import EXCHANGE_BUFFERS, EXCHANGE_PAGE_BYTES


class HostExchange:
    """Host copies of `tensors`, which are contiguous, have one data type and keep their memory on `device`."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device, page_bytes: int = EXCHANGE_PAGE_BYTES) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        dtype = tensors[0].dtype
        assert all(tensor.dtype == dtype for tensor in tensors)
        self._torch: Any = None if device.type == "cpu" else getattr(torch, device.type)
        page_numel = page_bytes // dtype.itemsize
        total_numel = sum(map(Tensor.numel, tensors))
        pages = _allocate_pages(total_numel, page_numel, dtype, pinned=self._torch is not None)
        self._pieces_of_tensors = _split_over_pages(self._tensors, pages)
        if self._torch is not None:
            self._loading = self._torch.Stream()
            self._saving = self._torch.Stream()
            self._staging = [torch.empty(page_numel, dtype=dtype, device=device) for _ in range(EXCHANGE_BUFFERS)]
        self.save_tensors()

    @torch.no_grad()
    def save_tensors(self) -> None:
        """Copy the tensors into host memory."""
        if self._torch is None:
            for tensor, page in self._all_pieces():
                page.copy_(tensor)
            return
        training = self._torch.current_stream()
        self._saving.wait_stream(training)
        with self._torch.stream(self._saving):
            for tensor, page in self._all_pieces():
                page.copy_(tensor, non_blocking=True)
        # Without this wait, the next update could change the tensors while they are still being copied.
        training.wait_stream(self._saving)

    @torch.no_grad()
    def exchange_tensors(self) -> None:
        """Exchange the values of the tensors with those in host memory."""
        if self._torch is None:
            for tensor, page in self._all_pieces():
                previous = tensor.clone()
                tensor.copy_(page)
                page.copy_(previous)
            return
        training = self._torch.current_stream()
        self._loading.wait_stream(training)
        # The previous exchange may still be filling the pages that we load now.
        self._loading.wait_stream(self._saving)

        saved: list[Any] = [None] * EXCHANGE_BUFFERS
        for number, (tensor, page) in enumerate(self._all_pieces()):
            buffer = number % EXCHANGE_BUFFERS
            staged = self._staging[buffer][: tensor.numel()]
            with self._torch.stream(self._loading):
                if saved[buffer] is not None:
                    self._loading.wait_event(saved[buffer])
                staged.copy_(tensor)
                tensor.copy_(page, non_blocking=True)
                loaded = self._loading.record_event()
            with self._torch.stream(self._saving):
                self._saving.wait_event(loaded)
                page.copy_(staged, non_blocking=True)
                saved[buffer] = self._saving.record_event()

        training.wait_stream(self._loading)

    def clone_saved(self, index: int) -> Tensor:
        """Return a new host tensor with the saved values of tensor `index`."""
        if self._torch is not None:
            self._saving.synchronize()
        pages = [page for _, page in self._pieces_of_tensors[index]]
        return torch.cat(pages).view(self._tensors[index].shape)

    def _all_pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (piece for pieces in self._pieces_of_tensors for piece in pieces)


def _allocate_pages(total_numel: int, page_numel: int, dtype: torch.dtype, *, pinned: bool) -> list[Tensor]:
    """Return flat tensors of at most `page_numel` elements each."""
    return [
        torch.empty(min(page_numel, total_numel - start), dtype=dtype, pin_memory=pinned)
        for start in range(0, total_numel, page_numel)
    ]


def _split_over_pages(tensors: Sequence[Tensor], pages: Sequence[Tensor]) -> list[list[tuple[Tensor, Tensor]]]:
    """Return the flat pieces of each tensor, each with the part of a page that stores it."""
    next_pages = iter(pages)
    page = next(next_pages)
    pieces_of_tensors = []
    for tensor in tensors:
        remaining = tensor.view(-1)
        pieces = []
        while remaining.numel():
            if not page.numel():
                page = next(next_pages)
            count = min(remaining.numel(), page.numel())
            pieces.append((remaining[:count], page[:count]))
            remaining = remaining[count:]
            page = page[count:]
        pieces_of_tensors.append(pieces)
    return pieces_of_tensors
