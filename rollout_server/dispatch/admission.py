"""Admission of groups by the dispatcher (`AdmissionGate`), and the supply of tasks for them (`TaskFeeder`).

    open <--pause, resume--> paused
      \\                      /
       +------> draining <---+        final: the server leaves the run once nothing is in flight

- While the gate is paused, the dispatcher waits in `wait_until_open`; `resume` unblocks it, and `drain` ends its
  requests for groups.
- The feeder waits until the dispatcher calls `request_top_up` after an admission, then appends tasks to the buffer. One
  server of the run feeds: it holds a claim on the board. If it dies, another server takes over after FEEDER_TTL_S. If
  two servers feed at the same time, the buffer keeps one stream and skips tasks that it already has. If a failover of
  the buffer's server loses tasks between the feeder's check and its append, the feeder checks again.
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
MAX_TASKS_PER_APPEND = 512

T = TypeVar("T")

MIN_STARVATION_S = 0.05
"""Reads of the source shorter than this are not reported as starvation."""
READ_BUDGET_S = 0.2
"""Seconds to read from the source before the tasks read so far are appended."""
MIN_CHECK_INTERVAL_S = 0.1
"""Minimum seconds between two checks of a buffer that had enough tasks. A check per admitted group would cost as much
as the admission itself. Meanwhile at least half of the target is left, which is the staleness window's capacity."""
StarvationReport = Callable[[float, float], None]
"""Called with the start and end of the starvation in Unix seconds."""

log = structlog.get_logger()


class AdmissionState(Enum):
    """State of the admission of groups, as `/readyz` and `/admin` show it."""

    OPEN = "open"
    PAUSED = "paused"
    DRAINING = "draining"


class AdmissionGate:
    """Switch between open, paused and draining; the administrator sets it and the dispatcher follows it."""

    def __init__(self) -> None:
        self.state = AdmissionState.OPEN
        self.stop_now = asyncio.Event()
        """Set if the server must not wait for groups in flight, but save their partials and give them back."""
        self._open = asyncio.Event()
        self._open.set()
        self._draining = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """True if the dispatcher may start a new group."""
        return self.state is AdmissionState.OPEN

    @property
    def is_draining(self) -> bool:
        """True if the server is about to leave the run."""
        return self.state is AdmissionState.DRAINING

    def pause(self) -> None:
        """Start no new groups; groups in flight continue. No effect while the server drains."""
        if self._switch_to(AdmissionState.PAUSED):
            self._open.clear()

    def resume(self) -> None:
        """Start groups again. No effect while the server drains."""
        if self._switch_to(AdmissionState.OPEN):
            self._open.set()

    def drain(self, *, now: bool = False) -> None:
        """Start no new groups, and leave once the groups in flight have finished; if `now`, leave with partials."""
        self._switch_to(AdmissionState.DRAINING)
        self._open.clear()
        self._draining.set()
        if now:
            self.stop_now.set()

    async def wait_until_open(self) -> None:
        """Wait until the gate is open. Never returns if the server drains, so call it in `run_until_draining`."""
        await self._open.wait()

    async def run_until_draining(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `work`, or raise its error. If the server drains first, cancel it and return None."""
        try:
            return await race(work, self._draining.wait())
        except Overtaken:
            return None

    def _switch_to(self, state: AdmissionState) -> bool:
        """Change the state. Returns False if the server already drains, which is final."""
        if self.is_draining:
            return False
        if state is not self.state:
            log.info("admission of groups changed", state=state.value)
            self.state = state
        return True


class TaskFeeder:
    """Fills the buffer up to `target` waiting tasks whenever at most half of them are left.

    The source is read in a thread, because its disk may be slow. Tasks are appended after READ_BUDGET_S or
    MAX_TASKS_PER_APPEND, so that servers have work while the rest is read.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        source: TaskSource,
        *,
        target: int,
        claim: Callable[[], Awaitable[bool]] | None = None,
        report_starvation: StarvationReport | None = None,
    ) -> None:
        """`claim` returns True if this server is the one that feeds; None: it always is. `report_starvation` is called
        if no task was waiting while the source was read."""
        self._buffer = buffer
        self._claim = claim
        self._source = source
        self._target = target
        self._report_starvation = report_starvation
        self._requested = asyncio.Event()
        self._is_short = False
        """True if the last append did not reach the target."""

    def request_top_up(self) -> None:
        """Request a check of the buffer: tasks were taken, or seem to be missing."""
        self._requested.set()

    async def run_feeding(self) -> None:
        """Top up at the start and after `request_top_up`, until cancelled.

        While another server holds the claim, try again when the claim would have expired.
        """
        while True:
            is_satisfied = await self.top_up_buffer()
            retry_s = None if is_satisfied else FEEDER_TTL_S
            with suppress(TimeoutError):
                async with asyncio.timeout(retry_s):
                    await self._requested.wait()

            if not self._is_short:
                await asyncio.sleep(MIN_CHECK_INTERVAL_S)
            # Clear only after the pause: requests that came during it are covered by the check that follows.
            self._requested.clear()

    async def top_up_buffer(self) -> bool:
        """Check the buffer once and append missing tasks; after a gap in the stream, try a second time.

        Returns False if tasks are missing and another server has to append them. Raises StreamGap for two gaps in a
        row.
        """
        try:
            return await self._check_and_append()
        except StreamGap as gap:
            log.warning("tasks were lost between check and append, checking again", reason=str(gap))
            return await self._check_and_append()

    async def _check_and_append(self) -> bool:
        stats = await self._buffer.stats()
        began_s = time.time()
        # After an append that was cut short, continue until the target is reached; otherwise start at half of it.
        enough = self._target - 1 if self._is_short else self._target // 2
        if stats.ended or stats.waiting > enough:
            return True
        if self._claim is not None and not await self._claim():
            return False

        count = self._target - stats.waiting
        tasks = await asyncio.to_thread(self._read_tasks, stats.tasks_put, min(count, MAX_TASKS_PER_APPEND))
        # Query the buffer before the append: afterwards there are always tasks.
        was_slow = time.time() - began_s >= MIN_STARVATION_S
        if self._report_starvation is not None and was_slow and not (await self._buffer.stats()).waiting:
            self._report_starvation(began_s, time.time())
        await self._buffer.put_tasks(tasks)

        self._is_short = len(tasks) < count
        if self._is_short:
            self.request_top_up()
        return True

    def _read_tasks(self, first: int, count: int) -> list[Task]:
        """Read up to `count` tasks from position `first`, for at most READ_BUDGET_S; at least one task."""
        until_s = time.monotonic() + READ_BUDGET_S
        tasks = [self._source.task(first)]
        while len(tasks) < count and time.monotonic() < until_s:
            tasks.append(self._source.task(first + len(tasks)))
        return tasks
