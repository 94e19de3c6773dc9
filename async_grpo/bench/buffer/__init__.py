"""The bench of the replay buffer on a real server.

- throughput  one and eight producer processes, one consumer, against a plain loop (`loops.py`)
- latency     from insert to take at a paced load
- scaling     what each transition costs when the run is full

On a server of its own, or on `url`. With fsync `everysec` the processor is the limit, and the figures say
what the buffer costs; with `always`, the default of a run, it is the disk: every answer waits for a sync,
and the buffer has two answers a group where the list has one. Figures of one invocation compare; those
of two machines, or of a busy one, do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.progress import Progress

from async_grpo.bench.buffer.crew import Crew
from async_grpo.bench.buffer.latency import latency
from async_grpo.bench.buffer.rounds import Shape
from async_grpo.bench.buffer.scaling import WARM_UP_CYCLES, Size, scaling
from async_grpo.bench.buffer.throughput import throughput
from async_grpo.bench.figures import Figure
from async_grpo.bench.server import Fsync, bench_server

MANY_PRODUCERS = 8


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    groups: int
    pairs: int
    paced_groups: int
    paced_pairs: int
    large: Size
    cycles: int


FULL = Effort(1280, 7, 200, 3, Size(100_000, 10_000), 400)
QUICK = Effort(128, 1, 10, 1, Size(400, 200), 10)


async def measure(
    progress: Progress, *, quick: bool, url: str | None = None, fsync: Fsync = "everysec"
) -> list[Figure]:
    """All figures; `quick` only shows that the bench works."""
    effort = QUICK if quick else FULL
    figures: list[Figure] = []

    def steps(what: str, total: int) -> Callable[[], None]:
        task = progress.add_task(what, total=total)
        return lambda: progress.advance(task)

    with bench_server(url, fsync) as redis:
        async with Crew(1 + MANY_PRODUCERS) as crew:
            for producers in (1, MANY_PRODUCERS):
                step = steps(f"throughput, producers: {producers}", effort.pairs)
                shape = Shape(producers=producers, groups=effort.groups)
                figures.append(await throughput(redis, crew, shape, effort.pairs, step))
            step = steps("latency", effort.paced_pairs)
            figures += await latency(redis, crew, effort.paced_groups, effort.paced_pairs, step)
        step = steps("cost of a transition", WARM_UP_CYCLES + effort.cycles + 2)
        figures += await scaling(redis, effort.large, effort.cycles, step)
    return figures
