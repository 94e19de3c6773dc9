"""Benchmark of the replay buffer on a real server, compared with a plain list on the same server.

- throughput  groups per second, with one or eight producer processes and one consumer
- masks       groups per second and bytes per token with sampling masks, compared with samples without; only with
              `truncated`
- latency     from insert to take, at a paced load that leaves the server idle most of the time
- scaling     cost of each transition in a run with many groups, compared with a run with few. Both are on one server,
              with tiny payloads. A cycle makes every call once and leaves the run's size unchanged; the cycles of the
              two runs alternate

Buffer and plain loop take turns; each result is the median over the pairs. The bench starts the server, unless `url`
is set. With fsync `everysec` the CPU is the limit, and the results show the cost of the buffer. With `always`, the
default of a run, the disk is the limit: every answer waits for a sync, and the buffer has two answers per group where
the list has one. Compare results of one invocation only, not of two machines or of a busy one.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import TypeVar, get_args

import numpy as np
from rich.progress import Progress

from async_grpo.config.buffer import RedisConfig
from async_grpo.lab.bench.measure import Measurement, Step, add_progress_bar, measure_pairs
from async_grpo.lab.bench.rig import Fsync, bench_server, check_trained
from async_grpo.lab.bench.sampling_masks import KEPT_TOKENS, measure_bytes_per_token
from async_grpo.staleness import StalenessWindow
from async_grpo.wire import Partial, ReleaseReason, Ticket
from benchmarks.buffer.systems import (
    BenchJob,
    Role,
    System,
    WorkerReport,
    attach,
    make_task,
    sample_groups,
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
"""Waiting tasks and ready groups of the small run that the large one is compared with."""
WARM_UP_CYCLES = 20
FILLED_AT_ONCE = 250
WAIT_S = 30.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a loop. `window.horizon` groups pass through it, a multiple of `producers` and `groups_per_step`."""

    producers: int
    window: StalenessWindow
    interval_s: float = 0.0
    truncated: bool = False
    """True if samples have sampling masks."""

    @property
    def groups(self) -> int:
        """Number of groups that pass through the loop."""
        return self.window.horizon


@dataclass(frozen=True, slots=True)
class BufferRound:
    """Seconds of one loop, from the first worker's start until the last group is released, and each group's latency."""

    seconds: float
    latencies_s: list[float]


@dataclass(frozen=True, slots=True)
class Size:
    """Number of waiting tasks and of ready groups in a run."""

    waiting: int
    ready: int


@dataclass(frozen=True, slots=True)
class BufferBenchSize:
    """Numbers of groups and repetitions."""

    groups: int
    pairs: int
    paced_groups: int
    paced_pairs: int
    large: Size
    cycles: int


FULL = BufferBenchSize(1280, 7, 200, 3, Size(100_000, 10_000), 400)
QUICK = BufferBenchSize(128, 1, 10, 1, Size(400, 200), 10)


async def measure(
    progress: Progress, *, quick: bool, url: str | None = None, fsync: Fsync = "everysec", truncated: bool = False
) -> list[Measurement]:
    """Run all benchmarks. `quick` only shows that they work. `truncated`: also measure sampling masks."""
    size = QUICK if quick else FULL
    measurements: list[Measurement] = []
    with bench_server(url, fsync) as redis:
        async with bench_workers(1 + MANY_PRODUCERS) as workers:
            for producers in (1, MANY_PRODUCERS):
                step = add_progress_bar(progress, f"throughput, producers: {producers}", size.pairs)
                shape = Shape(producers, StalenessWindow(max_staleness=2, groups_per_step=16, horizon=size.groups))
                measurements.append(await measure_throughput(redis, workers, shape, size.pairs, step))
            if truncated:
                step = add_progress_bar(progress, "sampling masks", size.pairs)
                measurements += await measure_sampling_masks(redis, workers, shape, size.pairs, step)
            step = add_progress_bar(progress, "latency", size.paced_pairs)
            measurements += await measure_latency(redis, workers, size.paced_groups, size.paced_pairs, step)
        step = add_progress_bar(progress, "cost of a transition", WARM_UP_CYCLES + size.cycles + 2)
        measurements += await measure_scaling(redis, size.large, size.cycles, step)
    return measurements


async def measure_throughput(redis: RedisConfig, workers: Workers, shape: Shape, count: int, step: Step) -> Measurement:
    """Measure groups per second from admission to release: `count` pairs of loops, after one warm-up loop of each."""
    for system in SYSTEMS:
        await run_round(redis, workers, shape, system)
    pairs = await _run_pairs(redis, workers, shape, count, step)
    producers = "1 producer" if shape.producers == 1 else f"{shape.producers} producers"
    rates = [(shape.groups / buffer.seconds, shape.groups / plain.seconds) for buffer, plain in pairs]
    return Measurement.paired(f"throughput, {producers}, 1 consumer", "groups/s", rates, PLAIN_LIST)


async def measure_sampling_masks(
    redis: RedisConfig, workers: Workers, shape: Shape, count: int, step: Step
) -> list[Measurement]:
    """Measure groups per second of the buffer and bytes per token with sampling masks, compared with none."""
    truncated = partial(run_round, redis, workers, replace(shape, truncated=True), "buffer")
    whole = partial(run_round, redis, workers, shape, "buffer")
    await truncated()  # warm up: the workers make their groups
    pairs = await measure_pairs(truncated, whole, count, step)

    rates = [(shape.groups / masked.seconds, shape.groups / plain.seconds) for masked, plain in pairs]
    sizes = [measure_bytes_per_token(sample_groups(truncated=is_truncated)) for is_truncated in (True, False)]
    name, baseline = f"with sampling masks of {KEPT_TOKENS} tokens", "without sampling masks"
    return [
        Measurement.paired(f"throughput {name}, {shape.producers} producers", "groups/s", rates, baseline),
        Measurement(f"groups {name}", sizes[0], "bytes/token", sizes[1], baseline, sizes[0] / sizes[1]),
    ]


async def measure_latency(
    redis: RedisConfig, workers: Workers, groups: int, count: int, step: Step
) -> list[Measurement]:
    """Measure latency percentiles in milliseconds over `count` pairs of loops, encoding and decoding included.

    Batches have one group, so each group is taken as soon as it is ready.
    """
    window = StalenessWindow(max_staleness=16, groups_per_step=1, horizon=groups)
    pairs = await _run_pairs(redis, workers, Shape(1, window, interval_s=1 / RATE_PER_S), count, step)
    buffer_rounds = [buffer for buffer, _ in pairs]
    plain_rounds = [plain for _, plain in pairs]
    measurements: list[Measurement] = []
    for percent in PERCENTILES:
        value = _latency_percentile_ms(buffer_rounds, percent)
        baseline = _latency_percentile_ms(plain_rounds, percent)
        name = f"insert to take at {RATE_PER_S:g} groups/s, p{percent}"
        measurements.append(Measurement(name, value, "ms", baseline, BLOCKING_LIST, value / baseline))
    return measurements


def _latency_percentile_ms(rounds: Sequence[BufferRound], percent: int) -> float:
    latencies_s = [latency_s for result in rounds for latency_s in result.latencies_s]
    return 1000 * float(np.percentile(latencies_s, percent, method="inverted_cdf"))


async def _run_pairs(
    redis: RedisConfig, workers: Workers, shape: Shape, count: int, step: Step
) -> list[tuple[BufferRound, BufferRound]]:
    buffer = partial(run_round, redis, workers, shape, "buffer")
    plain = partial(run_round, redis, workers, shape, "plain")
    return await measure_pairs(buffer, plain, count, step)


async def run_round(redis: RedisConfig, workers: Workers, shape: Shape, system: System) -> BufferRound:
    """Run a loop on a new run, check that every group passed through it, and remove the run from the server."""
    run = f"bench-{uuid.uuid4().hex}"
    try:
        if system == "plain":
            reports = await run_jobs(workers, _make_jobs(redis, run, shape, system))
        else:
            reports = await _run_through_buffer(redis, workers, shape, run)
    finally:
        await wipe_run(redis, run)
    consumer = reports[-1]
    started_s = min(report.started_s for report in reports)
    return BufferRound(consumer.ended_s - started_s, consumer.latencies_s)


async def _run_through_buffer(redis: RedisConfig, workers: Workers, shape: Shape, run: str) -> list[WorkerReport]:
    """Run the loop through the buffer. All tasks are put before the clock starts: feeding them is not measured."""
    buffer = await attach(redis, run, shape.window)
    try:
        for first in range(0, shape.groups, TASKS_AT_ONCE):
            count = min(TASKS_AT_ONCE, shape.groups - first)
            await buffer.put_tasks([make_task(index) for index in range(first, first + count)])
        reports = await run_jobs(workers, _make_jobs(redis, run, shape, "buffer"))
        await check_trained(buffer, shape.groups, "loop")
    finally:
        await buffer.aclose()
    return reports


def _make_jobs(redis: RedisConfig, run: str, shape: Shape, system: System) -> list[BenchJob]:
    """Return one job per producer, then the consumer's."""
    assert redis.url is not None
    url = redis.url

    def make_job(role: Role, worker: int, groups: int) -> BenchJob:
        return BenchJob(url, run, system, role, worker, groups, shape.window, shape.interval_s, shape.truncated)

    producers = [make_job("producer", number, shape.groups // shape.producers) for number in range(shape.producers)]
    return [*producers, make_job("consumer", shape.producers, shape.groups)]


async def measure_scaling(redis: RedisConfig, large: Size, cycles: int, step: Step) -> list[Measurement]:
    """Measure the median cost of every transition in microseconds. Calls `step` after every cycle and every fill."""
    capacity = 2 * large.ready
    small_run = await FullRun.open(redis, Size(SMALL, SMALL), capacity)
    large_run = await FullRun.open(redis, large, capacity)
    try:
        for run in (small_run, large_run):
            await run.fill()
            step()
        for _ in range(WARM_UP_CYCLES + cycles):
            await small_run.run_cycle()
            await large_run.run_cycle()
            step()
    finally:
        await small_run.aclose()
        await large_run.aclose()

    measurements: list[Measurement] = []
    for transition in small_run.costs_us:
        name = f"{transition} at {large.waiting:,} waiting, {large.ready:,} ready, p50"
        large_us = large_run.median_cost_us(transition)
        small_us = small_run.median_cost_us(transition)
        baseline = f"the same at {SMALL} and {SMALL}"
        measurements.append(Measurement(name, large_us, "us", small_us, baseline, large_us / small_us))
    return measurements


@dataclass(slots=True)
class FullRun:
    """A run of constant size."""

    redis: RedisConfig
    name: str
    size: Size
    buffer: RedisBuffer
    epoch: int
    version: int = 0
    tasks_put: int = 0
    costs_us: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    async def open(cls, redis: RedisConfig, size: Size, capacity: int) -> FullRun:
        """Create an empty run with batches of one group, for up to `capacity` groups."""
        name = f"bench-{uuid.uuid4().hex}"
        buffer = await attach(redis, name, StalenessWindow(max_staleness=capacity, groups_per_step=1, horizon=1 << 40))
        start = await buffer.rollback(0)
        return cls(redis, name, size, buffer, start.epoch)

    async def fill(self) -> None:
        """Fill the run to its size."""
        total = self.size.waiting + self.size.ready
        while self.tasks_put < total:
            await self._put_tasks(min(FILLED_AT_ONCE, total - self.tasks_put))
        ready = 0
        while ready < self.size.ready:
            tickets = await self._admit_groups(min(FILLED_AT_ONCE, self.size.ready - ready))
            async with asyncio.TaskGroup() as inserts:
                for ticket in tickets:
                    inserts.create_task(self.buffer.insert_group(ticket, tiny_group(ticket)))
            ready += len(tickets)

    async def run_cycle(self) -> None:
        """Make every transition once: put two tasks, train one group, discard one."""
        record = self._record_cost
        buffer = self.buffer
        await record("put_tasks", self._put_tasks(2))
        (trained,) = await record("admit", self._admit_groups(1))
        (discarded,) = await record("admit", self._admit_groups(1))
        await record("heartbeat", buffer.renew_leases([trained]))
        partial = Partial(seq=trained.seq, attempt=trained.attempt, samples=[*tiny_group(trained).samples])
        await record("progress", buffer.save_partial(trained, partial))
        await record("insert", buffer.insert_group(trained, tiny_group(trained)))
        await record("discard", buffer.discard_group(discarded, ReleaseReason.FILTERED))
        batch = await record("take", buffer.take_batch(epoch=self.epoch, version=self.version, timeout_s=WAIT_S))
        self.version += 1
        await record("publish_version", buffer.publish_version(epoch=self.epoch, version=self.version))
        await record("release", buffer.release_batch(batch))
        await record("commit_checkpoint", buffer.commit_checkpoint(epoch=self.epoch, version=self.version))
        await record("stats", buffer.stats())

    async def aclose(self) -> None:
        """Close the connection and remove the run from the server."""
        await self.buffer.aclose()
        await wipe_run(self.redis, self.name)

    def median_cost_us(self, transition: str) -> float:
        """Median cost of a transition in microseconds, without the warm-up."""
        return median(self.costs_us[transition][WARM_UP_CYCLES:])

    async def _put_tasks(self, count: int) -> None:
        await self.buffer.put_tasks([tiny_task(index) for index in range(self.tasks_put, self.tasks_put + count)])
        self.tasks_put += count

    async def _admit_groups(self, limit: int) -> list[Ticket]:
        return await self.buffer.admit_groups(limit, holder="bench", timeout_s=WAIT_S)

    async def _record_cost(self, transition: str, call: Awaitable[T]) -> T:
        started_s = time.perf_counter()
        result = await call
        self.costs_us[transition].append(1e6 * (time.perf_counter() - started_s))
        return result
