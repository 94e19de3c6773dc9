"""Whether the dispatcher may take up more groups (`AdmissionGate`), and the tasks it takes them from (`TaskFeeder`).

    open <--pause, resume--> paused
      \\                      /
       +------> draining <---+        for good: the server leaves the run once nothing is in flight

- While the gate is paused, the dispatcher waits in `opened`; `resume` unblocks it, and `drain` makes it stop asking
  for groups.
- The feeder waits until the dispatcher calls `notify` after an admission, then keeps tasks waiting in the buffer.
  Several servers may feed at once: the buffer keeps one stream and skips tasks that it has. If a failover of the
  buffer's server loses tasks between the feeder's look and its append, the feeder looks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from enum import Enum
from typing import Any, TypeVar

import structlog

from async_grpo.data.base import TaskSource
from async_grpo.errors import StreamGap
from async_grpo.utils.aio import Overtaken, race
from buffer.base import ReplayBuffer

T = TypeVar("T")

log = structlog.get_logger()


class AdmissionState(Enum):
    """State of the admission of groups, as `/readyz` and `/admin` show it."""

    OPEN = "open"
    PAUSED = "paused"
    DRAINING = "draining"


class AdmissionGate:
    """The switch between open, paused and draining, which the administrator sets and the dispatcher follows."""

    def __init__(self) -> None:
        self.state = AdmissionState.OPEN
        self.stop_now = asyncio.Event()
        """Set when the server must not wait for groups in flight: they are stored as partials and given back."""
        self._open = asyncio.Event()
        self._open.set()
        self._draining = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether the dispatcher may take up a new group."""
        return self.state is AdmissionState.OPEN

    @property
    def is_draining(self) -> bool:
        """Whether the server is about to leave the run."""
        return self.state is AdmissionState.DRAINING

    def pause(self) -> None:
        """Take up no new group; groups in flight go on. No effect on a server that drains."""
        if self._switch_to(AdmissionState.PAUSED):
            self._open.clear()

    def resume(self) -> None:
        """Take up groups again. No effect on a server that drains."""
        if self._switch_to(AdmissionState.OPEN):
            self._open.set()

    def drain(self, *, now: bool = False) -> None:
        """Take up no new group, and leave once those in flight have finished, or `now` with partials."""
        self._switch_to(AdmissionState.DRAINING)
        self._open.clear()
        self._draining.set()
        if now:
            self.stop_now.set()

    async def opened(self) -> None:
        """Wait until the gate is open. A server that drains waits for ever: use `until_draining` around it."""
        await self._open.wait()

    async def until_draining(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of the work, or None (and the work is cancelled) if the server drains first. Raises what the work
        raises."""
        try:
            return await race(work, self._draining.wait())
        except Overtaken:
            return None

    def _switch_to(self, state: AdmissionState) -> bool:
        """False if the server drains already: it never goes back."""
        if self.is_draining:
            return False
        if state is not self.state:
            log.info("admission of groups", state=state.value)
            self.state = state
        return True


class TaskFeeder:
    """Fills the buffer up to `target` waiting tasks whenever at most half of that are left."""

    def __init__(self, buffer: ReplayBuffer, source: TaskSource, *, target: int) -> None:
        self._buffer = buffer
        self._source = source
        self._target = target
        self._wanted = asyncio.Event()

    def notify(self) -> None:
        """Tell the feeder that tasks were taken, or seem to be missing."""
        self._wanted.set()

    async def run(self) -> None:
        """Top up at the start and after every `notify`, until cancelled."""
        while True:
            await self.top_up()
            await self._wanted.wait()
            self._wanted.clear()

    async def top_up(self) -> None:
        """Look at the buffer once and append at most once; after a gap, both a second time. Raises StreamGap for two
        gaps in a row."""
        try:
            await self._look_and_append()
        except StreamGap as gap:
            log.warning("tasks were lost between look and append, looking again", reason=str(gap))
            await self._look_and_append()

    async def _look_and_append(self) -> None:
        stats = await self._buffer.stats()
        if stats.ended or stats.waiting > self._target // 2:
            return
        first = stats.tasks_put
        count = self._target - stats.waiting
        await self._buffer.put_tasks([self._source.task(index) for index in range(first, first + count)])
