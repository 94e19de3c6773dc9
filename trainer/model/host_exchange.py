"""Copies of tensors in the host's memory, which can be exchanged with the tensors.

    tensor --1--> staging buffer --3--> page        1, 2  on the stream that loads
    tensor <-----------2--------------- page        3     on the stream that saves

Pages are page-locked, so both directions of the bus are busy at the same time, and this thread waits for neither. The
training's stream waits for the loads alone: it may compute while the last pieces are still being saved.

torch rounds a page-locked allocation up to a power of two, which for one allocation per tensor would be a third more
memory on average. Pages have such a size, and a tensor may begin in one page and end in another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.platform.memory import EXCHANGE_BUFFERS, EXCHANGE_PAGE_BYTES


class HostExchange:
    """Holds a copy of each of `tensors`, which are contiguous, have one data type and keep their memory on `device`."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device, page_bytes: int = EXCHANGE_PAGE_BYTES) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        dtype = tensors[0].dtype
        assert all(tensor.dtype == dtype for tensor in tensors)
        self._torch: Any = None if device.type == "cpu" else getattr(torch, device.type)
        page = page_bytes // dtype.itemsize
        pages = _make_pages(sum(map(Tensor.numel, tensors)), page, dtype, pinned=self._torch is not None)
        self._pieces = _cut(self._tensors, pages)
        if self._torch is not None:
            self._loading, self._saving = self._torch.Stream(), self._torch.Stream()
            self._staging = [torch.empty(page, dtype=dtype, device=device) for _ in range(EXCHANGE_BUFFERS)]
        self.store()

    @torch.no_grad()
    def store(self) -> None:
        """Copy the tensors into the host's memory."""
        if self._torch is None:
            for tensor, page in self._all_pieces():
                page.copy_(tensor)
            return
        training = self._torch.current_stream()
        self._saving.wait_stream(training)
        with self._torch.stream(self._saving):
            for tensor, page in self._all_pieces():
                page.copy_(tensor, non_blocking=True)
        training.wait_stream(self._saving)  # what changes the tensors next comes after it

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange the numbers of the tensors with those in the host's memory."""
        if self._torch is None:
            for tensor, page in self._all_pieces():
                before = tensor.clone()
                tensor.copy_(page)
                page.copy_(before)
            return
        training = self._torch.current_stream()
        self._loading.wait_stream(training)
        self._loading.wait_stream(self._saving)  # of the exchange before, which fills the pages
        saved: list[Any] = [None] * EXCHANGE_BUFFERS
        for number, (tensor, page) in enumerate(self._all_pieces()):
            place = number % EXCHANGE_BUFFERS
            staged = self._staging[place][: tensor.numel()]
            with self._torch.stream(self._loading):
                if saved[place] is not None:
                    self._loading.wait_event(saved[place])
                staged.copy_(tensor)
                tensor.copy_(page, non_blocking=True)
                loaded = self._loading.record_event()
            with self._torch.stream(self._saving):
                self._saving.wait_event(loaded)
                page.copy_(staged, non_blocking=True)
                saved[place] = self._saving.record_event()
        training.wait_stream(self._loading)

    def copy_of(self, number: int) -> Tensor:
        """Return a new tensor of the host with the numbers that are held for tensor `number`."""
        if self._torch is not None:
            self._saving.synchronize()
        return torch.cat([page for _, page in self._pieces[number]]).view(self._tensors[number].shape)

    def _all_pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (piece for pieces in self._pieces for piece in pieces)


def _make_pages(numbers: int, page: int, dtype: torch.dtype, *, pinned: bool) -> list[Tensor]:
    """Flat tensors of at most `page` numbers each."""
    return [
        torch.empty(min(page, numbers - start), dtype=dtype, pin_memory=pinned) for start in range(0, numbers, page)
    ]


def _cut(tensors: Sequence[Tensor], pages: Sequence[Tensor]) -> list[list[tuple[Tensor, Tensor]]]:
    """The flat pieces of each tensor, with the parts of pages that hold them."""
    following = iter(pages)
    found, page = [], next(following)
    for tensor in tensors:
        rest, pieces = tensor.view(-1), []
        while rest.numel():
            if not page.numel():
                page = next(following)
            count = min(rest.numel(), page.numel())
            pieces.append((rest[:count], page[:count]))
            rest, page = rest[count:], page[count:]
        found.append(pieces)
    return found
