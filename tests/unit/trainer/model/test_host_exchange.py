"""Weights and their copies in the host's memory change places, in whatever order a device works off its streams."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.model.host_exchange import HostExchange

SHAPES = ((7, 5), (3,), (2, 40), (1,), (11, 9))
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
PAGE_BYTES = 64
REAL_COPY, REAL_EMPTY = Tensor.copy_, torch.empty


def weights(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class Device:
    """Streams as a GPU has them: what is queued on one runs in its order, and any of them may be ahead."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.streams: list[Stream] = []
        self.current = self.training = Stream(self)
        self.pinned_bytes = 0

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            ready = [stream for stream in self.streams if stream.is_ready]
            self.random.choices(ready, [stream.speed for stream in ready])[0].advance()

    def finish(self) -> None:
        self.run_until(lambda: not any(stream.tasks for stream in self.streams))


class Event:
    happened = False


class Stream:
    def __init__(self, device: Device) -> None:
        self._device, self.speed = device, device.random.choice((1, 50))
        self.tasks: deque[tuple[Event | None, Callable[[], object]]] = deque()
        device.streams.append(self)

    @property
    def is_ready(self) -> bool:
        return bool(self.tasks) and (self.tasks[0][0] is None or self.tasks[0][0].happened)

    def advance(self) -> None:
        self.tasks.popleft()[1]()

    def record_event(self) -> Event:
        event = Event()
        self.tasks.append((None, lambda: setattr(event, "happened", True)))
        return event

    def wait_event(self, event: Event) -> None:
        self.tasks.append((event, lambda: None))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self._device.run_until(lambda: not self.tasks)


@pytest.fixture(params=range(12))
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device on whose present stream all copies of tensors are queued."""
    gpu = Device(request.param)

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, gpu.current = gpu.current, stream
        yield
        gpu.current = before

    def copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        gpu.current.tasks.append((None, lambda: REAL_COPY(target, source)))
        return target

    def empty(*shape: Any, dtype: torch.dtype, pin_memory: bool = False, device: Any = None) -> Tensor:
        made = REAL_EMPTY(*shape, dtype=dtype)
        gpu.pinned_bytes += pin_memory * (1 << (made.nbytes - 1).bit_length())  # as torch allocates it
        return made

    fake = {"Stream": lambda: Stream(gpu), "stream": on, "current_stream": lambda: gpu.training}
    for name, function in fake.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(Tensor, "copy_", copy)
    monkeypatch.setattr(torch, "empty", empty)
    return gpu


def test_an_exchange_and_back_leaves_every_number_in_its_place(device: Device) -> None:
    policy, reference = weights(1), weights(2)
    tensors = [tensor.clone() for tensor in reference]
    exchange = HostExchange(tensors, GPU, PAGE_BYTES)
    for tensor, value in zip(tensors, policy, strict=True):
        tensor.copy_(value)  # an update, on the training's stream
    seen: list[Tensor] = []
    for _ in range(2):
        exchange.exchange_tensors()
        device.training.tasks.append((None, lambda: seen.extend(tensor.clone() for tensor in tensors)))  # a pass
    held = [exchange.clone_saved(number) for number in range(len(tensors))]
    device.finish()
    assert same(seen, [*reference, *policy])
    assert same(tensors, policy)
    assert same(held, reference)


def test_a_reference_that_follows_takes_the_weights_of_before_the_next_update(device: Device) -> None:
    first, second, third = (weights(seed) for seed in (1, 2, 3))
    tensors = [tensor.clone() for tensor in first]
    exchange = HostExchange(tensors, GPU, PAGE_BYTES)
    for values in (second, third):
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
        if values is second:
            exchange.save_tensors()
    held = [exchange.clone_saved(number) for number in range(len(tensors))]
    device.finish()
    assert same(held, second)
    assert same(tensors, third)


def test_the_host_gives_no_more_than_a_page_beyond_the_weights(device: Device) -> None:
    tensors = weights(1)
    HostExchange(tensors, GPU, PAGE_BYTES)
    assert 0 <= device.pinned_bytes - sum(tensor.nbytes for tensor in tensors) < PAGE_BYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_cpu_the_same_numbers_change_places(dtype: torch.dtype) -> None:
    policy, reference = weights(1, dtype), weights(2, dtype)
    policy[0][0, 0] = float("nan")
    tensors = [tensor.clone() for tensor in reference]
    exchange = HostExchange(tensors, CPU, PAGE_BYTES)
    for tensor, value in zip(tensors, policy, strict=True):
        tensor.copy_(value)
    exchange.exchange_tensors()
    assert same(tensors, reference)
    exchange.exchange_tensors()
    assert same([tensor.view(torch.uint8) for tensor in tensors], [value.view(torch.uint8) for value in policy])
    assert same([exchange.clone_saved(number) for number in range(len(tensors))], reference)
