"""One loop of a system over so many groups, and pairs of loops whose noise cancels.

    buffer, plain | plain, buffer | buffer, plain | ...     ratio of each pair, and of these the median

What slows the machine down for seconds slows down both loops of a pair; the order alternates, so that
being second favours neither.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass

from async_grpo.bench.buffer.attach import attach
from async_grpo.bench.buffer.crew import Crew
from async_grpo.bench.buffer.jobs import Done, Job, Role, System
from async_grpo.bench.buffer.records import task
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
class Round:
    """What one loop took: from the first worker's start until the last group was taken and settled."""

    seconds: float
    latencies_s: list[float]


async def one_round(redis: RedisConfig, crew: Crew, shape: Shape, system: System) -> Round:
    """Run a loop on a fresh run, check that every group went through, and leave nothing on the server."""
    run = f"bench-{uuid.uuid4().hex}"
    try:
        if system == "plain":
            done = await crew.run(_jobs(redis, run, shape, system))
        else:
            done = await _through_the_buffer(redis, crew, shape, run)
    finally:
        await wipe_run(redis, run)
    consumer = done[-1]
    started_s = min(worker.started_s for worker in done)
    return Round(consumer.ended_s - started_s, consumer.latencies_s)


async def pairs(redis: RedisConfig, crew: Crew, shape: Shape, count: int) -> AsyncIterator[tuple[Round, Round]]:
    """(buffer, plain), `count` times."""
    for number in range(count):
        order: list[System] = ["buffer", "plain"] if number % 2 == 0 else ["plain", "buffer"]
        rounds = {system: await one_round(redis, crew, shape, system) for system in order}
        yield rounds["buffer"], rounds["plain"]


async def _through_the_buffer(redis: RedisConfig, crew: Crew, shape: Shape, run: str) -> list[Done]:
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
        done = await crew.run(_jobs(redis, run, shape, "buffer"))
        await _check(buffer, shape)
    finally:
        await buffer.aclose()
    return done


async def _check(buffer: RedisBuffer, shape: Shape) -> None:
    """Raises BufferFault unless every group was trained: a loop that lost some was faster than it should be."""
    stats = await buffer.stats()
    if not stats.balanced or stats.released["trained"] != shape.groups:
        raise BufferFault(f"the loop over {shape.groups} groups ended with {stats}: groups are missing")


def _jobs(redis: RedisConfig, run: str, shape: Shape, system: System) -> list[Job]:
    """The producers', then the consumer's."""
    assert redis.url is not None

    def job(role: Role, worker: int, groups: int) -> Job:
        assert redis.url is not None
        return Job(
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
