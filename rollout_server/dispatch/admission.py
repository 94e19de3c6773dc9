"""Whether the dispatcher may take up more groups (`AdmissionGate`), and the tasks it takes them from (`TaskFeeder`).

    open <--pause, resume--> paused
      \\                      /
       +------> draining <---+        for good: the server leaves the run once nothing is in flight

- While the gate is paused, the dispatcher waits in `opened`; `resume` unblocks it, and `drain` makes it stop asking
  for groups.
- The feeder waits until the dispatcher calls `notify` after an admission, then keeps tasks waiting in the buffer.
  One server of the run feeds: it claims that on the board, and another does it FEEDER_TTL_S after it has died. Should
  two feed at once, the buffer keeps one stream and skips tasks that it has. If a failover of the buffer's server loses
  tasks between the feeder's look and its append, the feeder looks again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from enum import Enum
from typing import Any, TypeVar

import structlog

from async_grpo.data.base import TaskSource
from async_grpo.errors import StreamGap
from async_grpo.utils.aio import Overtaken, race
from async_grpo.wire import Task
from buffer.base import ReplayBuffer

FEEDER_TTL_S = 5.0
FED_AT_ONCE = 512
"""Most tasks that are made and sent in one piece."""

T = TypeVar("T")

NOTED_S = 0.05
"""Shortest reading of the source that is told if no task was waiting at its end."""
READ_S = 0.2
"""Seconds for which the source is read before what it has given is appended."""
LOOK_EVERY_S = 0.1
"""Shortest time between two looks at a buffer that had enough tasks. A look per admitted group would cost as much as
the admission itself; half of the target, which is the staleness window's capacity, is left in the meantime."""
Starved = Callable[[float, float], None]

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
    """Fills the buffer up to `target` waiting tasks whenever at most half of that are left.

    The source is read in a thread, because its disk may be slow. What it gives in READ_S, and FED_AT_ONCE at most, is
    appended at once, so that servers have something to do while the rest is read.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        source: TaskSource,
        *,
        target: int,
        claim: Callable[[], Awaitable[bool]] | None = None,
        starved: Starved = lambda *_: None,
    ) -> None:
        """`claim`: whether this server is the one that feeds; None: it always is. `starved` is told when no task was
        waiting while the source was read: begin and end in Unix seconds."""
        self._buffer = buffer
        self._claim = claim
        self._source = source
        self._target = target
        self._starved = starved
        self._wanted = asyncio.Event()
        self._is_short = False
        """Whether the last piece did not reach the target."""

    def notify(self) -> None:
        """Tell the feeder that tasks were taken, or seem to be missing."""
        self._wanted.set()

    async def run(self) -> None:
        """Top up at the start and after `notify`, until cancelled. While another server is to do it, look again when
        its claim would have ended."""
        while True:
            again_s = None if await self.top_up() else FEEDER_TTL_S
            with suppress(TimeoutError):
                async with asyncio.timeout(again_s):
                    await self._wanted.wait()
            if not self._is_short:
                await asyncio.sleep(LOOK_EVERY_S)
            self._wanted.clear()

    async def top_up(self) -> bool:
        """Look at the buffer once and append what is missing; after a gap, both a second time. Raises StreamGap for
        two gaps in a row. Returns False if tasks are missing and another server is to append them."""
        try:
            return await self._look_and_append()
        except StreamGap as gap:
            log.warning("tasks were lost between look and append, looking again", reason=str(gap))
            return await self._look_and_append()

    async def _look_and_append(self) -> bool:
        stats, began_s = await self._buffer.stats(), time.time()
        if stats.ended or stats.waiting > (self._target - 1 if self._is_short else self._target // 2):
            return True
        if self._claim is not None and not await self._claim():
            return False
        count = self._target - stats.waiting
        tasks = await asyncio.to_thread(self._read, stats.tasks_put, min(count, FED_AT_ONCE))
        if time.time() - began_s >= NOTED_S and not (await self._buffer.stats()).waiting:
            self._starved(began_s, time.time())
        await self._buffer.put_tasks(tasks)
        self._is_short = len(tasks) < count
        if self._is_short:
            self.notify()
        return True

    def _read(self, first: int, count: int) -> list[Task]:
        """Tasks from the position `first` on: as many as the source gives in READ_S, but one at least."""
        until_s, tasks = time.monotonic() + READ_S, [self._source.task(first)]
        while len(tasks) < count and time.monotonic() < until_s:
            tasks.append(self._source.task(first + len(tasks)))
        return tasks
