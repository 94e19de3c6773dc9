"""Tensors of a device come to the host through two buffers, whose contents are there once their events say so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.model.host_copy import HostCopy, split_into_pieces

DEVICE = torch.device("cuda", 0)
REAL_EMPTY = torch.empty
NOT_YET = 0xAB


class LateStream:
    """What is copied on it is in the buffer only when its event has happened, which takes two queries."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.buffers: list[Tensor] = []
        self.events = 0

    def record_event(self) -> LateEvent:
        buffer = self.buffers[self.events % 2]
        self.events += 1
        event = LateEvent(buffer, buffer.clone())
        buffer.fill_(NOT_YET)
        return event


class LateEvent:
    def __init__(self, buffer: Tensor, content: Tensor) -> None:
        self._buffer, self._content = buffer, content
        self._queries = 0

    def query(self) -> bool:
        self._queries += 1
        if self._queries == 2:
            assert bool((self._buffer == NOT_YET).all()), "the buffer was filled again before it was emptied"
            self._buffer.copy_(self._content)
        return self._queries > 1


class Update:
    """The event of the training's stream after its update of the weights."""

    def __init__(self, stream: LateStream) -> None:
        self._stream = stream
        self._queries = 0

    def query(self) -> bool:
        self._queries += 1
        if self._queries == 2:
            self._stream.log.append("after the update")
            self._stream.events = 0
        return self._queries > 1


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> LateStream:
    """A device with the functions of torch.cuda that `HostCopy` calls, all of which torch.cuda has."""
    stream = LateStream()

    class Training:
        def record_event(self) -> Update:
            return Update(stream)

    @contextlib.contextmanager
    def entered(of: LateStream) -> Iterator[None]:
        of.log.append("on the side stream")
        yield

    def empty(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        made = REAL_EMPTY(*shape, **options)
        if pin_memory:
            stream.buffers.append(made)
        return made

    functions: dict[str, Any] = {
        "stream": entered,
        "current_stream": Training,
        "current_device": lambda: 3,
        "set_device": lambda index: stream.log.append(f"device {index}"),
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function, raising=True)
    monkeypatch.setattr(torch, "empty", empty)
    return stream


def test_torch_streams_have_the_methods_that_are_called() -> None:
    assert "record_event" in dir(torch.cuda.Stream)
    assert "query" in dir(torch.cuda.Event)


@pytest.mark.parametrize("buffer_bytes", [16, 100, 1 << 20])
def test_every_tensor_arrives_whole_through_small_buffers(stream: LateStream, buffer_bytes: int) -> None:
    sources = [torch.randn(7, 5), torch.randn(3), torch.randn(4, 6, 5).bfloat16(), torch.randn(9, 8)[:, 2:5]]
    full = torch.zeros(12, 5)
    targets = [full[2:9], torch.zeros(3), torch.zeros(4, 6, 5).bfloat16(), torch.zeros(9, 3)]
    copy = HostCopy(DEVICE, stream, buffer_bytes)
    for _ in range(2):
        copy.record_update()
        copy.copy_to_host(zip(targets, sources, strict=True))
        for target, source in zip(targets, sources, strict=True):
            assert torch.equal(target, source)
            target.zero_()
    assert not full.any(), "rows of others"
    assert stream.log == ["device 3", "after the update", "on the side stream"] * 2
    assert [each.nbytes for each in stream.buffers] == [buffer_bytes] * 2


def test_on_the_cpu_nothing_is_in_between(stream: LateStream) -> None:
    target, source = torch.zeros(2, 3), torch.randn(2, 3)
    copy = HostCopy(torch.device("cpu"), None)
    copy.record_update()
    copy.copy_to_host([(target, source)])
    assert torch.equal(target, source) and not stream.buffers and not stream.log


def test_pieces_are_rows_that_fit() -> None:
    whole = torch.arange(24.0).view(4, 3, 2)
    shapes = {
        most: [tuple(piece.shape) for piece, _ in split_into_pieces(whole, whole, most)] for most in (96, 48, 16, 8)
    }
    assert shapes == {96: [(4, 3, 2)], 48: [(2, 3, 2)] * 2, 16: [(2, 2), (1, 2)] * 4, 8: [(1, 2)] * 12}
