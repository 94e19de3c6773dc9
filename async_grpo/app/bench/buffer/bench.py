"""The bench of the replay buffer on a real server, beside a plain loop on the same server.

- throughput  groups a second, with one and eight producer processes and one consumer
- latency     from insert to take, at a paced load that leaves the server idle most of the time
- scaling     what each transition costs when the run is full

    buffer, plain | plain, buffer | buffer, plain | ...     the ratio of each pair, and their median

What slows the machine down for seconds slows down both loops of a pair. The order alternates, so that being second
favours neither.

It uses a server of its own, or the one at `url`. With fsync `everysec` the processor is the limit, and the figures say
what the buffer costs. With `always`, the default of a run, the disk is the limit: every answer waits for a sync, and
the buffer has two answers a group where the list has one. Figures of one invocation can be compared; figures of two
machines, or of a busy one, cannot.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from statistics import median

from rich.progress import Progress

from async_grpo.app.bench.buffer.groups import task
from async_grpo.app.bench.buffer.scaling import WARM_UP_CYCLES, Size, scaling
from async_grpo.app.bench.buffer.systems import BenchJob, Role, System, WorkerReport, attach
from async_grpo.app.bench.buffer.workers import BenchWorkers
from async_grpo.app.bench.measure import Fsync, Measurement, bench_server
from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import BufferFault
from buffer import RedisBuffer, wipe_run

TASKS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """A loop: who takes part, how much goes through, and the dials of the buffer. `groups` is a multiple of
    `producers` and of `groups_per_step`."""

    producers: int
    groups: int
    max_staleness: int = 2
    groups_per_step: int = 16
    interval_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BufferRound:
    """What one loop took: from the first worker's start until the last group was taken and settled."""

    seconds: float
    latencies_s: list[float]


async def one_round(redis: RedisConfig, workers: BenchWorkers, shape: Shape, system: System) -> BufferRound:
    """Run a loop on a fresh run, check that every group went through, and leave nothing on the server."""
    run = f"bench-{uuid.uuid4().hex}"
    try:
        if system == "plain":
            done = await workers.run(_jobs(redis, run, shape, system))
        else:
            done = await _through_the_buffer(redis, workers, shape, run)
    finally:
        await wipe_run(redis, run)
    consumer = done[-1]
    started_s = min(worker.started_s for worker in done)
    return BufferRound(consumer.ended_s - started_s, consumer.latencies_s)


async def pairs(
    redis: RedisConfig, workers: BenchWorkers, shape: Shape, count: int
) -> AsyncIterator[tuple[BufferRound, BufferRound]]:
    """(buffer, plain), `count` times."""
    for number in range(count):
        order: list[System] = ["buffer", "plain"] if number % 2 == 0 else ["plain", "buffer"]
        rounds = {system: await one_round(redis, workers, shape, system) for system in order}
        yield rounds["buffer"], rounds["plain"]


async def _through_the_buffer(redis: RedisConfig, workers: BenchWorkers, shape: Shape, run: str) -> list[WorkerReport]:
    """The tasks are there before the clock starts: feeding them is no part of the loop."""
    buffer = await attach(
        redis,
        run,
        max_staleness=shape.max_staleness,
        groups_per_step=shape.groups_per_step,
        horizon=shape.groups,
    )
    try:
        for first in range(0, shape.groups, TASKS_AT_ONCE):
            count = min(TASKS_AT_ONCE, shape.groups - first)
            await buffer.put_tasks([task(index) for index in range(first, first + count)])
        done = await workers.run(_jobs(redis, run, shape, "buffer"))
        await _check(buffer, shape)
    finally:
        await buffer.aclose()
    return done


async def _check(buffer: RedisBuffer, shape: Shape) -> None:
    """Raises BufferFault unless every group was trained: a loop that lost some was faster than it should be."""
    stats = await buffer.stats()
    if not stats.balanced or stats.released["trained"] != shape.groups:
        raise BufferFault(f"the loop over {shape.groups} groups ended with {stats}: groups are missing")


def _jobs(redis: RedisConfig, run: str, shape: Shape, system: System) -> list[BenchJob]:
    """The producers', then the consumer's."""
    assert redis.url is not None

    def job(role: Role, worker: int, groups: int) -> BenchJob:
        assert redis.url is not None
        return BenchJob(
            url=redis.url,
            run=run,
            system=system,
            role=role,
            worker=worker,
            groups=groups,
            max_staleness=shape.max_staleness,
            groups_per_step=shape.groups_per_step,
            horizon=shape.groups,
            interval_s=shape.interval_s,
        )

    share = shape.groups // shape.producers
    producers = [job("producer", number, share) for number in range(shape.producers)]
    return [*producers, job("consumer", shape.producers, shape.groups)]


RATE_PER_S = 20.0
BLOCKING_LIST = "SET + RPUSH -> BLMPOP + MGET"
PERCENTILES = (50, 99)


def paced(groups: int) -> Shape:
    """Batches of one group: each is taken as soon as it is there."""
    return Shape(producers=1, groups=groups, max_staleness=16, groups_per_step=1, interval_s=1 / RATE_PER_S)


async def latency(
    redis: RedisConfig, workers: BenchWorkers, groups: int, count: int, step: Callable[[], None]
) -> list[Measurement]:
    """Percentiles over all groups of `count` pairs of loops, in milliseconds; encoding and decoding are in it."""
    buffer_ms: list[float] = []
    plain_ms: list[float] = []
    async for buffer, plain in pairs(redis, workers, paced(groups), count):
        buffer_ms += [1000 * each for each in buffer.latencies_s]
        plain_ms += [1000 * each for each in plain.latencies_s]
        step()
    return [_figure(percent, percentile(buffer_ms, percent), percentile(plain_ms, percent)) for percent in PERCENTILES]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _figure(percent: int, value: float, baseline: float) -> Measurement:
    return Measurement(
        name=f"insert to take at {RATE_PER_S:g} groups/s, p{percent}",
        value=value,
        unit="ms",
        baseline=baseline,
        baseline_name=BLOCKING_LIST,
        ratio=value / baseline,
    )


PLAIN_LIST = "SET/GET/DEL + list, same bytes"


async def throughput(
    redis: RedisConfig, workers: BenchWorkers, shape: Shape, count: int, step: Callable[[], None]
) -> Measurement:
    """Groups a second from admission to release, medians of `count` pairs of loops after one of each that
    warms up. `step` is called after every pair."""
    for system in ("buffer", "plain"):
        await one_round(redis, workers, shape, system)
    rates: list[tuple[float, float]] = []
    async for buffer, plain in pairs(redis, workers, shape, count):
        rates.append((shape.groups / buffer.seconds, shape.groups / plain.seconds))
        step()
    producers = "1 producer" if shape.producers == 1 else f"{shape.producers} producers"
    return Measurement(
        name=f"throughput, {producers}, 1 consumer",
        value=median(buffer for buffer, _ in rates),
        unit="groups/s",
        baseline=median(plain for _, plain in rates),
        baseline_name=PLAIN_LIST,
        ratio=median(buffer / plain for buffer, plain in rates),
    )


MANY_PRODUCERS = 8


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

    def steps(what: str, total: int) -> Callable[[], None]:
        task = progress.add_task(what, total=total)
        return lambda: progress.advance(task)

    with bench_server(url, fsync) as redis:
        async with BenchWorkers(1 + MANY_PRODUCERS) as workers:
            for producers in (1, MANY_PRODUCERS):
                step = steps(f"throughput, producers: {producers}", size.pairs)
                shape = Shape(producers=producers, groups=size.groups)
                figures.append(await throughput(redis, workers, shape, size.pairs, step))
            step = steps("latency", size.paced_pairs)
            figures += await latency(redis, workers, size.paced_groups, size.paced_pairs, step)
        step = steps("cost of a transition", WARM_UP_CYCLES + size.cycles + 2)
        figures += await scaling(redis, size.large, size.cycles, step)
    return figures
