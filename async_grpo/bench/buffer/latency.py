"""How long after its insert a group is with the trainer, at a load that leaves the server idle most of the time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from async_grpo.bench.buffer.crew import Crew
from async_grpo.bench.buffer.rounds import Shape, pairs
from async_grpo.bench.figures import Figure
from async_grpo.config.buffer import RedisConfig

RATE_PER_S = 20.0
PLAIN = "SET + RPUSH -> BLMPOP + MGET"
PERCENTILES = (50, 99)


def paced(groups: int) -> Shape:
    """Batches of one group: each is taken as soon as it is there."""
    return Shape(producers=1, groups=groups, max_staleness=16, groups_per_step=1, interval_s=1 / RATE_PER_S)


async def latency(redis: RedisConfig, crew: Crew, groups: int, count: int, step: Callable[[], None]) -> list[Figure]:
    """Percentiles over all groups of `count` pairs of loops, in milliseconds; encoding and decoding are in it."""
    buffer_ms: list[float] = []
    plain_ms: list[float] = []
    async for buffer, plain in pairs(redis, crew, paced(groups), count):
        buffer_ms += [1000 * each for each in buffer.latencies_s]
        plain_ms += [1000 * each for each in plain.latencies_s]
        step()
    return [_figure(percent, percentile(buffer_ms, percent), percentile(plain_ms, percent)) for percent in PERCENTILES]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _figure(percent: int, value: float, baseline: float) -> Figure:
    return Figure(
        name=f"insert to take at {RATE_PER_S:g} groups/s, p{percent}",
        value=value,
        unit="ms",
        baseline=baseline,
        baseline_name=PLAIN,
        ratio=value / baseline,
    )
