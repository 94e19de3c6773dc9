"""Whoever changes the weights waits for who reads them, and gets what went wrong."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.errors import PublisherLost
from trainer.model.policy import BackgroundReading
from trainer.weights import WeightExporter


def test_waiting_ends_when_the_reader_has_ended() -> None:
    reading, may_end, order = BackgroundReading(), threading.Event(), []

    def read() -> None:
        may_end.wait(10)
        order.append("read")

    reading.start_reading(read)
    threading.Timer(0.05, may_end.set).start()
    reading.wait_until_read()
    order.append("changed")
    assert order == ["read", "changed"]
    reading.wait_until_read()  # nobody reads


def test_what_the_reader_raised_is_raised_once() -> None:
    reading = BackgroundReading()

    def read() -> None:
        raise PublisherLost("gone")

    reading.start_reading(read)
    with pytest.raises(PublisherLost, match="gone"):
        reading.wait_until_read()
    reading.wait_until_read()
    reading.start_reading(lambda: None)
    reading.wait_until_read()


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_a_version_is_copied_while_the_next_step_computes_on_every_device(device: str) -> None:
    computing, copied = threading.Event(), list[int]()

    class Shards:
        def record_update(self) -> None: ...

        def copy_version(self, version: int) -> None:
            assert computing.wait(10), "the training thread waits for the copy"
            copied.append(version)

    policy: Any = SimpleNamespace(reading=BackgroundReading(), device=SimpleNamespace(type=device))
    exporter: Any = object.__new__(WeightExporter)
    exporter._policy, exporter._announced = policy, True
    exporter._publish_shards(Shards(), 3)
    assert not copied
    computing.set()
    policy.reading.wait_until_read()
    assert copied == [3]
