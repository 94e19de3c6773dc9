"""Keeps tasks waiting in the buffer.

    dispatcher --nudge (a ticket was admitted)--> Feeder --put_tasks--> buffer

The feeder waits for a nudge; admissions and its own start unblock it. Several servers may feed at
once: the buffer keeps one stream, tasks that are there already are skipped. A failover of the server between look and
append may have lost tasks that were there: the feeder then looks again.
"""

from __future__ import annotations

import asyncio

import structlog

from async_grpo.data.source import TaskSource
from async_grpo.errors import StreamGap
from buffer.protocol import ReplayBuffer

log = structlog.get_logger()


class Feeder:
    """Tops up to `target` waiting tasks whenever at most half of them are left."""

    def __init__(self, buffer: ReplayBuffer, source: TaskSource, *, target: int) -> None:
        self._buffer = buffer
        self._source = source
        self._target = target
        self._wanted = asyncio.Event()

    def nudge(self) -> None:
        """Tasks were taken, or seem to be missing."""
        self._wanted.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.top_up()
            await self._wanted.wait()
            self._wanted.clear()

    async def top_up(self) -> None:
        """One look, and at most one append; both once more after a gap. Raises StreamGap for two gaps in a row."""
        try:
            await self._look_and_append()
        except StreamGap as gap:
            log.warning("tasks were lost meanwhile, looking again", reason=str(gap))
            await self._look_and_append()

    async def _look_and_append(self) -> None:
        stats = await self._buffer.stats()
        if stats.ended or stats.waiting > self._target // 2:
            return
        first = stats.tasks_put
        count = self._target - stats.waiting
        await self._buffer.put_tasks([self._source.task(index) for index in range(first, first + count)])
