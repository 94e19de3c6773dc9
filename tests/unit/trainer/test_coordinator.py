"""How a rank takes over a run, alone and in one process."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from async_grpo.config import validate
from async_grpo.errors import TrainingError
from buffer.memory import InMemoryBuffer
from trainer import coordinator
from trainer.coordinator import Coordinator


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
    monkeypatch.setattr(coordinator, "broadcast_bytes", lambda payload: payload)
    before = signal.getsignal(signal.SIGTERM)
    yield Coordinator(config)
    signal.signal(signal.SIGTERM, before)


def test_a_checkpoint_whose_buffer_is_gone_is_refused_with_a_way_out(alone: Coordinator) -> None:
    with pytest.raises(TrainingError, match=r"version 8, but the server knows nothing of run lost.*--fresh"):
        alone.resume(8)


def test_a_wait_for_groups_ends_with_sigterm(alone: Coordinator) -> None:
    assert alone.resume(0).epoch == 1
    signal.raise_signal(signal.SIGTERM)
    assert alone.take(0) is None
