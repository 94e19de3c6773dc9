"""How many groups a second go through the buffer, beside the plain loop on the same server."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from async_grpo.bench.buffer.crew import Crew
from async_grpo.bench.buffer.rounds import Shape, one_round, pairs
from async_grpo.bench.figures import Figure
from async_grpo.config.buffer import RedisConfig

PLAIN = "SET/GET/DEL + list, same bytes"


async def throughput(redis: RedisConfig, crew: Crew, shape: Shape, count: int, step: Callable[[], None]) -> Figure:
    """Groups a second from admission to release, medians of `count` pairs of loops after one of each that
    warms up. `step` is called after every pair."""
    for system in ("buffer", "plain"):
        await one_round(redis, crew, shape, system)
    rates: list[tuple[float, float]] = []
    async for buffer, plain in pairs(redis, crew, shape, count):
        rates.append((shape.groups / buffer.seconds, shape.groups / plain.seconds))
        step()
    producers = "1 producer" if shape.producers == 1 else f"{shape.producers} producers"
    return Figure(
        name=f"throughput, {producers}, 1 consumer",
        value=median(buffer for buffer, _ in rates),
        unit="groups/s",
        baseline=median(plain for _, plain in rates),
        baseline_name=PLAIN,
        ratio=median(buffer / plain for buffer, plain in rates),
    )
