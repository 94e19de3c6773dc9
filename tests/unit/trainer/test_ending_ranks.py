"""A node ends its ranks, also one that does not die."""

from __future__ import annotations

import asyncio
import signal
from typing import Any, cast

import pytest

from trainer.ranks import local_ranks
from trainer.ranks.local_ranks import LocalRanks, Rank


class StuckProcess:
    """A process that hangs in its kernel: no signal ends it."""

    returncode = None

    def __init__(self) -> None:
        self.signals: list[int] = []

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    async def wait(self) -> int:
        await asyncio.Event().wait()
        return 0


async def test_a_rank_that_sigkill_does_not_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ranks, "GRACE_S", 0.01)
    monkeypatch.setattr(local_ranks, "KILLED_S", 0.01)
    monkeypatch.setattr(local_ranks, "_LAST_OUTPUT_S", 0.01)
    process, errors = StuckProcess(), local_ranks.ErrorOutput()
    async with asyncio.timeout(5):
        await LocalRanks([Rank(0, cast(Any, process), errors)]).terminate()
    assert process.signals == [signal.SIGTERM, signal.SIGKILL]
