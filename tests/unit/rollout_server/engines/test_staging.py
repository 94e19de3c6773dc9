"""Staging of a version by a thread: copies, capacity, versions and early loads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from async_grpo.weights.manifest import WeightVersion
from rollout_server.engines.vllm.staging import ALIGNMENT, StagingBuffer, Tensors

FIRST, SECOND = WeightVersion(0, 1), WeightVersion(0, 2)
CPU = torch.device("cpu")


def tensors_of(**values: torch.Tensor) -> list[tuple[str, Callable[[], Tensors]]]:
    return [(name, partial(list, [(name, tensor)])) for name, tensor in values.items()]


def wait_for(buffer: StagingBuffer) -> int:
    deadline = time.monotonic() + 10
    while (staged := buffer.staged_bytes) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return staged


def test_staged_tensors_are_copies_of_every_dtype_and_shape() -> None:
    buffer = StagingBuffer(16 * ALIGNMENT, CPU)
    odd, half = torch.arange(7, dtype=torch.int8), torch.randn(3, 5).to(torch.bfloat16)
    scalar = torch.tensor(2.5)
    buffer.start_staging(FIRST, tensors_of(odd=odd, half=half, scalar=scalar))
    assert wait_for(buffer) == 3 * ALIGNMENT
    expected = {"odd": odd.clone(), "half": half.clone(), "scalar": scalar.clone()}
    odd.zero_(), half.zero_(), scalar.zero_()
    for name, tensors in buffer.collect_staged(FIRST).items():
        ((loaded_name, tensor),) = tensors
        assert loaded_name == name and tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]) and tensor.shape == expected[name].shape
    assert set(buffer.collect_staged(FIRST)) == set(expected)


def test_tensors_that_do_not_fit_are_skipped_and_later_smaller_ones_staged() -> None:
    buffer = StagingBuffer(2 * ALIGNMENT, CPU)
    buffer.start_staging(FIRST, tensors_of(a=torch.ones(4), b=torch.ones(ALIGNMENT), c=torch.ones(4)))
    wait_for(buffer)
    assert set(buffer.collect_staged(FIRST)) == {"a", "c"}


def test_parts_of_one_tensor_are_staged_together_or_not_at_all() -> None:
    buffer = StagingBuffer(ALIGNMENT, CPU)
    numbers, scales = torch.ones(8, dtype=torch.int8), torch.ones(8, 1)
    buffer.start_staging(FIRST, [("matrix", lambda: [("matrix", numbers), ("matrix_scale", scales)])])
    assert wait_for(buffer) == 0 and not buffer.collect_staged(FIRST)


def test_nothing_is_collected_for_another_version() -> None:
    buffer = StagingBuffer(ALIGNMENT, CPU)
    buffer.start_staging(FIRST, tensors_of(a=torch.ones(4)))
    wait_for(buffer)
    assert not buffer.collect_staged(SECOND)
    buffer.start_staging(SECOND, tensors_of(a=torch.zeros(4)))
    wait_for(buffer)
    assert not buffer.collect_staged(FIRST) and not buffer.collect_staged(SECOND)["a"][0][1].any()


def test_an_early_load_gets_complete_tensors_and_stops_the_copies() -> None:
    buffer, reached, may_continue = StagingBuffer(4 * ALIGNMENT, CPU), threading.Event(), threading.Event()

    def slow() -> Tensors:
        reached.set()
        may_continue.wait(10)
        return [("slow", torch.ones(4))]

    buffer.start_staging(FIRST, [*tensors_of(a=torch.ones(4)), ("slow", slow), *tensors_of(late=torch.ones(4))])
    assert reached.wait(10) and buffer.staged_bytes is None
    threading.Timer(0.05, may_continue.set).start()
    assert set(buffer.collect_staged(FIRST)) == {"a", "slow"}


def test_a_tensor_that_cannot_be_made_stops_the_copies_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Tensors:
        raise ValueError("no such bytes")

    buffer = StagingBuffer(4 * ALIGNMENT, CPU)
    buffer.start_staging(FIRST, [*tensors_of(a=torch.ones(4)), ("b", broken)])
    wait_for(buffer)
    assert set(buffer.collect_staged(FIRST)) == {"a"}
    assert "staged only in part: ValueError: no such bytes" in caplog.text
