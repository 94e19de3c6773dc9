"""Whoever changes the weights waits for who reads them, and gets what went wrong."""

from __future__ import annotations

import threading

import pytest

from async_grpo.errors import PublisherLost
from trainer.model.policy import BackgroundReading


def test_waiting_ends_when_the_reader_has_ended() -> None:
    reading, may_end, order = BackgroundReading(), threading.Event(), []

    def read() -> None:
        may_end.wait(10)
        order.append("read")

    reading.start(read)
    threading.Timer(0.05, may_end.set).start()
    reading.wait()
    order.append("changed")
    assert order == ["read", "changed"]
    reading.wait()  # nobody reads


def test_what_the_reader_raised_is_raised_once() -> None:
    reading = BackgroundReading()

    def read() -> None:
        raise PublisherLost("gone")

    reading.start(read)
    with pytest.raises(PublisherLost, match="gone"):
        reading.wait()
    reading.wait()
    reading.start(lambda: None)
    reading.wait()
