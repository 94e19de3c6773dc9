"""How a rank takes over a run, alone and in one process."""

from __future__ import annotations

import fcntl
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_grpo.config import validate
from async_grpo.errors import TrainingError, WaitTimeout
from async_grpo.utils.files import try_lock
from buffer.memory import InMemoryBuffer
from trainer import coordinator
from trainer.coordinator import Coordinator, SharedDevices


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    config = validate({"name": "lost", "model": {"random": {}}}, "test")
    buffer = InMemoryBuffer(config.replay_policy, lease_s=60.0, max_attempts=3)

    async def empty(*_: object) -> InMemoryBuffer:
        return buffer

    monkeypatch.setattr(coordinator, "open_run", empty)
    monkeypatch.setattr(coordinator, "connect_board", empty)
    monkeypatch.setattr(coordinator, "is_leader", lambda: True)
    monkeypatch.setattr(coordinator, "broadcast_ints", lambda values, _: values)
    monkeypatch.setattr(coordinator, "broadcast_batch", lambda batch: batch)
    before = signal.getsignal(signal.SIGTERM)
    yield Coordinator(config, SharedDevices(config))
    signal.signal(signal.SIGTERM, before)


def test_a_checkpoint_whose_buffer_is_gone_is_refused_with_a_way_out(alone: Coordinator) -> None:
    with pytest.raises(TrainingError, match=r"version 8, but the server knows nothing of run lost.*--fresh"):
        alone.resume(8)


def test_a_wait_for_groups_ends_with_sigterm(alone: Coordinator) -> None:
    assert alone.resume(0).epoch == 1
    signal.raise_signal(signal.SIGTERM)
    assert alone.take(0) is None


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

    with devices.held():
        assert not engine_may_wake() and not released
    assert released == [False] and engine_may_wake()
    assert try_lock(engine, shared=True)  # and it does not sleep again
    with pytest.raises(WaitTimeout, match=r"waited 0\.1 s for the engines on the trainer's devices"), devices.held():
        pass
