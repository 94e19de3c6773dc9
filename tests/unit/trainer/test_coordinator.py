"""How a rank takes over a run, alone and in one process."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_grpo.config import validate
from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import NodeLost, PublisherLost, TrainingError, WaitTimeout
from async_grpo.utils.files import try_lock
from async_grpo.weights.manifest import make_layout
from async_grpo.weights.zmq.sender import ZmqWeightSender
from buffer.memory import InMemoryBuffer
from trainer import coordinator
from trainer.coordinator import Coordinator, SharedDevices
from trainer.model.policy import BackgroundReading

LAYOUT = make_layout([("weight", "float32", [4])])


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    config = validate({"name": "lost", "model": {"random": {}}}, "test")
    buffer = InMemoryBuffer(config.replay_policy, lease_s=60.0, max_attempts=3)

    async def empty(*_: object) -> InMemoryBuffer:
        return buffer

    monkeypatch.setattr(coordinator, "open_run", empty)
    monkeypatch.setattr(coordinator, "connect_board", empty)
    monkeypatch.setattr(coordinator, "is_rank_zero", lambda: True)
    monkeypatch.setattr(coordinator, "broadcast_ints", lambda values, _: values)
    monkeypatch.setattr(coordinator, "broadcast_batch", lambda batch: batch)
    before = signal.getsignal(signal.SIGTERM)
    yield Coordinator(config, SharedDevices(config))
    signal.signal(signal.SIGTERM, before)


def test_a_checkpoint_whose_buffer_is_gone_is_refused_with_a_way_out(alone: Coordinator) -> None:
    with pytest.raises(TrainingError, match=r"version 8, .*run lost.*--fresh"):
        alone.resume_run(8)


def test_a_wait_for_groups_ends_with_sigterm(alone: Coordinator) -> None:
    assert alone.resume_run(0).epoch == 1
    signal.raise_signal(signal.SIGTERM)
    assert alone.take_batch(0) is None


def test_a_wait_for_groups_ends_when_the_publisher_was_killed(alone: Coordinator) -> None:
    alone.resume_run(0)
    with ZmqWeightSender(LAYOUT, f"unit-coordinator-{os.getpid()}", 1, WeightsConfig()) as sender:
        alone.set_publishing_check(sender.check_publisher)
        os.kill(sender.process_id, signal.SIGKILL)
        started_s = time.monotonic()
        with pytest.raises(PublisherLost, match="code -9"):
            alone.take_batch(0)
        assert time.monotonic() - started_s < 10.0  # and not take_timeout_s


def test_a_wait_for_groups_ends_when_the_weights_could_not_be_copied(alone: Coordinator) -> None:
    alone.resume_run(0)
    reading = BackgroundReading()

    def copy() -> None:
        raise NodeLost("rank 3 did not copy its weights")

    reading.start_reading(copy)
    alone.set_publishing_check(reading.raise_failure)
    with pytest.raises(NodeLost, match="rank 3"):
        alone.take_batch(0)


def test_sigterm_comes_before_a_failed_publication(alone: Coordinator) -> None:
    alone.resume_run(0)

    def check() -> None:
        signal.raise_signal(signal.SIGTERM)
        raise PublisherLost("gone")

    alone.set_publishing_check(check)
    assert alone.take_batch(0) is None


@pytest.mark.usefixtures("alone")
def test_devices_are_held_while_engines_sleep_and_memory_is_released_before_they_wake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "sum_over_ranks", lambda values: values)
    launch = {"share_devices": "sleep", "ready_timeout_s": 0.05}
    raw = {"name": "shared", "runs_dir": str(tmp_path), "model": {"random": {}}, "launch": launch}
    config = validate(raw | {"weights": {"update_timeout_s": 0.05}}, "test")
    released: list[bool] = []
    devices = SharedDevices(config, lambda: released.append(engine_may_wake()))
    engine = (config.run_dir / ".device-use").open()

    def engine_may_wake() -> bool:
        if free := try_lock(engine, shared=True):
            fcntl.flock(engine, fcntl.LOCK_UN)
        return free

    with devices.engines_asleep():
        assert not engine_may_wake() and not released
    assert released == [False] and engine_may_wake()
    assert try_lock(engine, shared=True)  # and it does not sleep again
    with pytest.raises(WaitTimeout, match=r"0\.1 s .*engines"), devices.engines_asleep():
        pass
