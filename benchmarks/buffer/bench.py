"""The bench of the replay buffer on a real server, beside a plain loop on the same server.

- throughput  groups a second, with one and eight producer processes and one consumer
- latency     from insert to take, at a paced load that leaves the server idle most of the time
- scaling     what each transition costs in a run with many groups, beside the same in a run with few. Both are on one
              server, with tiny payloads; a cycle makes every call once and leaves the numbers as they were, and the
              cycles of the two runs alternate

Buffer and plain loop take turns; each figure is the median over the pairs. The server is the bench's own, or the one at
`url`. With fsync `everysec` the processor is the limit, and the figures say what the buffer costs. With `always`, the
default of a run, the disk is the limit: every answer waits for a sync, and the buffer has two answers a group where the
list has one. Figures of one invocation can be compared; figures of two machines, or of a busy one, cannot.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TypeVar, get_args

import numpy as np
from rich.progress import Progress

from async_grpo.config.buffer import RedisConfig
from async_grpo.lab.bench.measure import Measurement, Step, paired_rounds, progress_bar
from async_grpo.lab.bench.rig import Fsync, bench_server, check_trained
from async_grpo.staleness import StalenessWindow
from async_grpo.wire import Partial, ReleaseReason, Ticket
from benchmarks.buffer.systems import (
    BenchJob,
    Role,
    System,
    WorkerReport,
    attach,
    task,
    tiny_group,
    tiny_task,
)
from benchmarks.buffer.workers import Workers, bench_workers, run_jobs
from buffer import RedisBuffer, wipe_run

SYSTEMS: tuple[System, ...] = get_args(System)
TASKS_AT_ONCE = 64
MANY_PRODUCERS = 8
RATE_PER_S = 20.0
PERCENTILES = (50, 99)
PLAIN_LIST = "SET/GET/DEL + list, same bytes"
BLOCKING_LIST = "SET + RPUSH -> BLMPOP + MGET"
SMALL = 100
"""Waiting tasks and ready groups of the run beside the full one."""
WARM_UP_CYCLES = 20
FILLED_AT_ONCE = 250
WAIT_S = 30.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shape:
    """A loop: its producers, and the dials of the buffer. `window.horizon` groups go through it, a multiple of
    `producers` and of `window.groups_per_step`."""

    producers: int
    window: StalenessWindow
    interval_s: float = 0.0

    @property
    def groups(self) -> int:
        """How many groups go through."""
        return self.window.horizon


@dataclass(frozen=True, slots=True)
class BufferRound:
    """What one loop took, from the first worker's start until the last group was taken and settled."""

    seconds: float
    latencies_s: list[float]


@dataclass(frozen=True, slots=True)
class Size:
    """How many tasks wait and how many groups are ready in a run."""

    waiting: int
    ready: int


@dataclass(frozen=True, slots=True)
class BufferBenchSize:
    """How much is measured."""

    groups: int
    pairs: int
    paced_groups: int
    paced_pairs: int
    large: Size
    cycles: int


FULL = BufferBenchSize(1280, 7, 200, 3, Size(100_000, 10_000), 400)
QUICK = BufferBenchSize(128, 1, 10, 1, Size(400, 200), 10)


async def measure(
    progress: Progress, *, quick: bool, url: str | None = None, fsync: Fsync = "everysec"
) -> list[Measurement]:
    """All figures; `quick` only shows that the bench works."""
    size = QUICK if quick else FULL
    figures: list[Measurement] = []
    with bench_server(url, fsync) as redis:
        async with bench_workers(1 + MANY_PRODUCERS) as workers:
            for producers in (1, MANY_PRODUCERS):
                step = progress_bar(progress, f"throughput, producers: {producers}", size.pairs)
                shape = Shape(producers, StalenessWindow(max_staleness=2, groups_per_step=16, horizon=size.groups))
                figures.append(await throughput(redis, workers, shape, size.pairs, step))
            step = progress_bar(progress, "latency", size.paced_pairs)
            figures += await latency(redis, workers, size.paced_groups, size.paced_pairs, step)
        step = progress_bar(progress, "cost of a transition", WARM_UP_CYCLES + size.cycles + 2)
        figures += await scaling(redis, size.large, size.cycles, step)
    return figures


async def throughput(redis: RedisConfig, workers: Workers, shape: Shape, count: int, step: Step) -> Measurement:
    """Groups a second from admission to release, medians of `count` pairs of loops after one of each that warms up."""
    for system in SYSTEMS:
        await one_round(redis, workers, shape, system)
    pairs = await _pairs(redis, workers, shape, count, step)
    producers = "1 producer" if shape.producers == 1 else f"{shape.producers} producers"
    rates = [(shape.groups / buffer.seconds, shape.groups / plain.seconds) for buffer, plain in pairs]
    return Measurement.paired(f"throughput, {producers}, 1 consumer", "groups/s", rates, PLAIN_LIST)


async def latency(redis: RedisConfig, workers: Workers, groups: int, count: int, step: Step) -> list[Measurement]:
    """Percentiles over all groups of `count` pairs of loops, in milliseconds, with encoding and decoding.

    Batches have one group: each is taken as soon as it is there.
    """
    window = StalenessWindow(max_staleness=16, groups_per_step=1, horizon=groups)
    pairs = await _pairs(redis, workers, Shape(1, window, interval_s=1 / RATE_PER_S), count, step)
    figures = []
    for percent in PERCENTILES:
        value, baseline = (
            1000 * float(np.percentile([s for each in side for s in each.latencies_s], percent, method="inverted_cdf"))
            for side in zip(*pairs, strict=True)
        )
        name = f"insert to take at {RATE_PER_S:g} groups/s, p{percent}"
        figures.append(Measurement(name, value, "ms", baseline, BLOCKING_LIST, value / baseline))
    return figures


async def _pairs(
    redis: RedisConfig, workers: Workers, shape: Shape, count: int, step: Step
) -> list[tuple[BufferRound, BufferRound]]:
    buffer, plain = (partial(one_round, redis, workers, shape, system) for system in SYSTEMS)
    return await paired_rounds(buffer, plain, count, step)


async def one_round(redis: RedisConfig, workers: Workers, shape: Shape, system: System) -> BufferRound:
    """Run a loop on a fresh run, check that every group went through, and leave nothing on the server."""
    run = f"bench-{uuid.uuid4().hex}"
    try:
        if system == "plain":
            done = await run_jobs(workers, _jobs(redis, run, shape, system))
        else:
            done = await _through_the_buffer(redis, workers, shape, run)
    finally:
        await wipe_run(redis, run)
    consumer = done[-1]
    started_s = min(worker.started_s for worker in done)
    return BufferRound(consumer.ended_s - started_s, consumer.latencies_s)


async def _through_the_buffer(redis: RedisConfig, workers: Workers, shape: Shape, run: str) -> list[WorkerReport]:
    """Run the loop through the buffer. All tasks are put before the clock starts: feeding them is not measured."""
    buffer = await attach(redis, run, shape.window)
    try:
        for first in range(0, shape.groups, TASKS_AT_ONCE):
            count = min(TASKS_AT_ONCE, shape.groups - first)
            await buffer.put_tasks([task(index) for index in range(first, first + count)])
        done = await run_jobs(workers, _jobs(redis, run, shape, "buffer"))
        await check_trained(buffer, shape.groups, "loop")
    finally:
        await buffer.aclose()
    return done


def _jobs(redis: RedisConfig, run: str, shape: Shape, system: System) -> list[BenchJob]:
    """One job for each producer, then the consumer's."""
    assert redis.url is not None
    url = redis.url

    def job(role: Role, worker: int, groups: int) -> BenchJob:
        return BenchJob(url, run, system, role, worker, groups, shape.window, shape.interval_s)

    producers = [job("producer", number, shape.groups // shape.producers) for number in range(shape.producers)]
    return [*producers, job("consumer", shape.producers, shape.groups)]


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
            await self._put(min(FILLED_AT_ONCE, total - self.tasks_put))
        ready = 0
        while ready < self.size.ready:
            tickets = await self._admit(min(FILLED_AT_ONCE, self.size.ready - ready))
            async with asyncio.TaskGroup() as inserting:
                for ticket in tickets:
                    inserting.create_task(self.buffer.insert_group(ticket, tiny_group(ticket)))
            ready += len(tickets)

    async def cycle(self) -> None:
        """Make every transition once: two tasks come in, one group is trained and one is discarded."""
        timed, buffer = self._timed, self.buffer
        await timed("put_tasks", self._put(2))
        (kept,) = await timed("admit", self._admit(1))
        (dropped,) = await timed("admit", self._admit(1))
        await timed("heartbeat", buffer.renew_leases([kept]))
        partial = Partial(seq=kept.seq, attempt=kept.attempt, samples=[*tiny_group(kept).samples])
        await timed("progress", buffer.save_partial(kept, partial))
        await timed("insert", buffer.insert_group(kept, tiny_group(kept)))
        await timed("discard", buffer.discard_group(dropped, ReleaseReason.FILTERED))
        batch = await timed("take", buffer.take_batch(epoch=self.epoch, version=self.version, timeout_s=WAIT_S))
        self.version += 1
        await timed("publish_version", buffer.publish_version(epoch=self.epoch, version=self.version))
        await timed("release", buffer.release_batch(batch))
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
        return await self.buffer.admit_groups(limit, holder="bench", timeout_s=WAIT_S)

    async def _timed(self, transition: str, call: Awaitable[T]) -> T:
        begin_s = time.perf_counter()
        result = await call
        self.costs_us[transition].append(1e6 * (time.perf_counter() - begin_s))
        return result
