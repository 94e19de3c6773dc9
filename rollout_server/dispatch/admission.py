"""Whether the dispatcher may take up more groups.

    open <--pause, resume--> paused
      \\                      /
       +------> draining <---+        for good: the server leaves the run when nothing is in flight any more

The dispatcher waits here while it is paused; `resume` unblocks it, and `drain` ends its asking for groups.

Keeps tasks waiting in the buffer.

    dispatcher --notify (a ticket was admitted)--> TaskFeeder --put_tasks--> buffer

The feeder waits for a notify; admissions and its own start unblock it. Several servers may feed at
once: the buffer keeps one stream, tasks that are there already are skipped. A failover of the server between look and
append may have lost tasks that were there: the feeder then looks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from enum import Enum
from typing import Any, TypeVar

import structlog

from async_grpo.data.base import TaskSource
from async_grpo.errors import StreamGap
from buffer.base import ReplayBuffer

T = TypeVar("T")


log = structlog.get_logger()


class AdmissionState(Enum):
    """Of the admission of groups."""

    OPEN = "open"
    PAUSED = "paused"
    DRAINING = "draining"


class AdmissionGate:
    """A switch that somebody else may turn."""

    def __init__(self) -> None:
        self.state = AdmissionState.OPEN
        self.stop_now = asyncio.Event()
        """Do not wait for what is in flight: store it and give it back."""
        self._open = asyncio.Event()
        self._open.set()
        self._draining = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether a new group may be taken up."""
        return self.state is AdmissionState.OPEN

    @property
    def is_draining(self) -> bool:
        """Whether the server is about to leave."""
        return self.state is AdmissionState.DRAINING

    def pause(self) -> None:
        """Take up nothing new; what is in flight goes on. A server that drains goes on draining."""
        if self._turn(AdmissionState.PAUSED):
            self._open.clear()

    def resume(self) -> None:
        """Take up groups again. A server that drains goes on draining."""
        if self._turn(AdmissionState.OPEN):
            self._open.set()

    def drain(self, *, now: bool = False) -> None:
        """Take up nothing more, and leave once what is in flight has finished, or `now` with partials."""
        self._turn(AdmissionState.DRAINING)
        self._open.clear()
        self._draining.set()
        if now:
            self.stop_now.set()

    async def opened(self) -> None:
        """Wait while it is paused, and for ever once it drains (see `until_draining`)."""
        await self._open.wait()

    async def until_draining(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of the work; None if somebody drains before it is there. Raises what the work raises."""
        working, draining = asyncio.create_task(work), asyncio.create_task(self._draining.wait())
        try:
            await asyncio.wait([working, draining], return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            working.cancel()
            draining.cancel()
            await asyncio.gather(working, draining, return_exceptions=True)

    def _turn(self, state: AdmissionState) -> bool:
        """Whether it may be turned."""
        if self.is_draining:
            return False
        if state is not self.state:
            log.info("admission of groups", state=state.value)
            self.state = state
        return True


class TaskFeeder:
    """Tops up to `target` waiting tasks whenever at most half of them are left."""

    def __init__(self, buffer: ReplayBuffer, source: TaskSource, *, target: int) -> None:
        self._buffer = buffer
        self._source = source
        self._target = target
        self._wanted = asyncio.Event()

    def notify(self) -> None:
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
