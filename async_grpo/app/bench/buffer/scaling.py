"""What one transition costs in a run with many groups, beside the same in a run with few.

Two runs on one server, tiny payloads: SMALL waiting tasks and ready groups in one, many in the other.
A cycle makes every call once and leaves the numbers as they were; the cycles of the two runs alternate.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

from async_grpo.app.bench.buffer.groups import tiny_group, tiny_task
from async_grpo.app.bench.buffer.systems import attach
from async_grpo.app.bench.measure import Measurement, Step
from async_grpo.config.buffer import RedisConfig
from async_grpo.staleness import StalenessWindow
from async_grpo.wire import Partial, ReleaseReason, Ticket
from buffer import RedisBuffer, wipe_run

SMALL = 100
WARM_UP_CYCLES = 20
AT_ONCE = 250
WAIT_S = 30.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Size:
    """How many tasks wait and how many groups are ready in a run."""

    waiting: int
    ready: int


async def scaling(redis: RedisConfig, large: Size, cycles: int, step: Step) -> list[Measurement]:
    """The median cost of every transition, in microseconds. `step` is called after every cycle and every fill."""
    room = 2 * large.ready
    small_run = await FullRun.open(redis, Size(SMALL, SMALL), room)
    large_run = await FullRun.open(redis, large, room)
    try:
        for run in (small_run, large_run):
            await run.fill()
            step()
        for _ in range(WARM_UP_CYCLES + cycles):
            await small_run.cycle()
            await large_run.cycle()
            step()
    finally:
        await small_run.aclose()
        await large_run.aclose()
    figures = []
    for transition in small_run.costs_us:
        name = f"{transition} at {large.waiting:,} waiting, {large.ready:,} ready, p50"
        cost, of_small = large_run.cost_us(transition), small_run.cost_us(transition)
        figures.append(Measurement(name, cost, "us", of_small, f"the same at {SMALL} and {SMALL}", cost / of_small))
    return figures


@dataclass(slots=True)
class FullRun:
    """A run that is kept at one size."""

    redis: RedisConfig
    name: str
    size: Size
    buffer: RedisBuffer
    epoch: int
    version: int = 0
    tasks_put: int = 0
    costs_us: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    async def open(cls, redis: RedisConfig, size: Size, room: int) -> FullRun:
        """A new, empty run. A batch has one group, and up to `room` groups fit."""
        name = f"bench-{uuid.uuid4().hex}"
        buffer = await attach(redis, name, StalenessWindow(max_staleness=room, groups_per_step=1, horizon=1 << 40))
        return cls(redis, name, size, buffer, (await buffer.rollback(0)).epoch)

    async def fill(self) -> None:
        """Fill the run to its size."""
        total = self.size.waiting + self.size.ready
        while self.tasks_put < total:
            await self._put(min(AT_ONCE, total - self.tasks_put))
        ready = 0
        while ready < self.size.ready:
            tickets = await self._admit(min(AT_ONCE, self.size.ready - ready))
            async with asyncio.TaskGroup() as inserting:
                for ticket in tickets:
                    inserting.create_task(self.buffer.insert(ticket, tiny_group(ticket)))
            ready += len(tickets)

    async def cycle(self) -> None:
        """Make every transition once: two tasks come in, one group is trained and one is discarded."""
        timed, buffer = self._timed, self.buffer
        await timed("put_tasks", self._put(2))
        (kept,) = await timed("admit", self._admit(1))
        (dropped,) = await timed("admit", self._admit(1))
        await timed("heartbeat", buffer.heartbeat([kept]))
        partial = Partial(seq=kept.seq, attempt=kept.attempt, samples=[*tiny_group(kept).samples])
        await timed("progress", buffer.progress(kept, partial))
        await timed("insert", buffer.insert(kept, tiny_group(kept)))
        await timed("discard", buffer.discard(dropped, ReleaseReason.FILTERED))
        batch = await timed("take", buffer.take(epoch=self.epoch, version=self.version, timeout_s=WAIT_S))
        self.version += 1
        await timed("publish_version", buffer.publish_version(epoch=self.epoch, version=self.version))
        await timed("release", buffer.release(batch))
        await timed("commit_checkpoint", buffer.commit_checkpoint(epoch=self.epoch, version=self.version))
        await timed("stats", buffer.stats())

    async def aclose(self) -> None:
        """Close, and leave nothing on the server."""
        await self.buffer.aclose()
        await wipe_run(self.redis, self.name)

    def cost_us(self, transition: str) -> float:
        """The median cost of a transition in microseconds, without the warm-up."""
        return median(self.costs_us[transition][WARM_UP_CYCLES:])

    async def _put(self, count: int) -> None:
        await self.buffer.put_tasks([tiny_task(index) for index in range(self.tasks_put, self.tasks_put + count)])
        self.tasks_put += count

    async def _admit(self, limit: int) -> list[Ticket]:
        return await self.buffer.admit(limit, holder="bench", timeout_s=WAIT_S)

    async def _timed(self, transition: str, call: Awaitable[T]) -> T:
        begin_s = time.perf_counter()
        result = await call
        self.costs_us[transition].append(1e6 * (time.perf_counter() - begin_s))
        return result
