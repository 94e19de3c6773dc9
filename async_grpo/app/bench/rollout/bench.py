"""The bench of the rollout server on a real engine.

    one engine <-- the whole server   tickets from a real Valkey, rewards from real processes, groups back into it
               <-- bare vLLM          the same requests from a plain loop (`rollout_server.engines.vllm.direct`)

- overhead   of the whole server: tokens a second beside bare vLLM, with a model that keeps the engine busy, and
             with one of the quickstart's size, whose tokens cost Python more than the engine
- dispatch   where lengths differ much: completions that start as slots become free, beside waves

The weights stand still and nothing is evaluated; what updates cost is a figure of its own. Figures of one
invocation can be compared; figures of two machines, or of a busy one, cannot.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from rich.progress import Progress

from async_grpo.app.bench.measure import Measurement, bench_server
from async_grpo.app.bench.paired import Pairs, RolloutRound, in_pairs
from async_grpo.app.bench.rollout.server_round import open_setup
from async_grpo.app.bench.rollout.updates import BenchModelSize
from async_grpo.app.bench.rollout.workload import LogNormal, RolloutWork, Uniform
from async_grpo.config.buffer import RedisConfig
from async_grpo.telemetry.logging import configure_logging

BARE = "bare AsyncLLM, same requests"
WAVES = "bare AsyncLLM in waves, same requests"


def overhead(policy: str, work: RolloutWork, pairs: Pairs) -> list[Measurement]:
    """Figures of the whole server: its speed beside bare vLLM, and its CPU time in Python."""
    name = f"whole server, {policy}"
    used, used_by_bare = _cpu_us(pairs.whole), _cpu_us(pairs.baseline)
    cpu = Measurement(f"{name}: CPU time of its process", used, "us/token", used_by_bare, BARE, used / used_by_bare)
    return [*_speed(name, work, BARE, pairs), cpu]


def dispatch(policy: str, work: RolloutWork, pairs: Pairs) -> list[Measurement]:
    """Figures of continuous dispatch: what it gains to start a completion whenever a slot is free."""
    return _speed(f"continuous dispatch, {policy}", work, WAVES, pairs)


def _speed(name: str, work: RolloutWork, baseline: str, pairs: Pairs) -> list[Measurement]:
    speed, speed_of_baseline = _tokens_per_s(pairs.whole), _tokens_per_s(pairs.baseline)
    tokens, tokens_of_baseline = sum(pairs.whole[0].tokens), sum(pairs.baseline[0].tokens)
    asked = f"{work.concurrency} in flight, {work.lengths}"
    return [
        Measurement(f"{name}, {asked}", speed, "tokens/s", speed_of_baseline, baseline, pairs.ratio),
        Measurement(f"{name}: lowest of {len(pairs.ratios)} ratios", pairs.ratios[0], "x"),
        Measurement(f"{name}: highest of {len(pairs.ratios)} ratios", pairs.ratios[-1], "x"),
        Measurement(f"{name}: tokens of a round", tokens, "tokens", tokens_of_baseline, "asserted to be the same"),
    ]


def _tokens_per_s(rounds: list[RolloutRound]) -> float:
    return median(one.tokens_per_s for one in rounds)


def _cpu_us(rounds: list[RolloutRound]) -> float:
    return median(one.cpu_us_per_token for one in rounds)


LARGE = BenchModelSize(hidden_size=640, layers=12, heads=10, kv_heads=2, intermediate_size=1792, vocab_size=4096)
"""56 million parameters."""
TINY = BenchModelSize(hidden_size=128, layers=2, heads=4, kv_heads=2, intermediate_size=384, vocab_size=32)
"""As the quickstart's."""
PAIRS = 3
STEADY = RolloutWork(groups=20, group_size=8, groups_per_step=4, concurrency=32, lengths=Uniform(32, 96))
"""Some 20 s on two cores."""
UNEVEN = RolloutWork(groups=24, group_size=8, groups_per_step=4, concurrency=32, lengths=LogNormal(24, 1.2, 384))
"""Half of the completions have at most 24 tokens, the longest of 32 some nine times as many."""
SHORT = RolloutWork(
    groups=128, group_size=16, groups_per_step=16, concurrency=96, lengths=Uniform(20, 40), prompt_tokens=8
)
"""As the quickstart's."""


@dataclass(frozen=True, slots=True)
class RolloutBenchSize:
    """A model and the work that is measured with it. `uneven`: the work of dispatch beside waves."""

    model: BenchModelSize
    even: RolloutWork
    uneven: RolloutWork | None = None


FULL = (RolloutBenchSize(LARGE, STEADY, UNEVEN), RolloutBenchSize(TINY, SHORT))
QUICK = (
    RolloutBenchSize(
        TINY, replace(SHORT, groups=16, lengths=Uniform(4, 8)), replace(UNEVEN, groups=8, lengths=LogNormal(8, 1.0, 64))
    ),
)


async def measure(progress: Progress, *, quick: bool) -> list[Measurement]:
    """All figures. `quick` only shows that the bench works, with the tiny model alone."""
    configure_logging("bench")
    figures: list[Measurement] = []
    with bench_server(None) as redis:
        for size in QUICK if quick else FULL:
            figures += await _measure(size, redis, 1 if quick else PAIRS, progress)
    return [*figures, Measurement("load average of the last 5 minutes, at the end", os.getloadavg()[1], "processes")]


async def _measure(size: RolloutBenchSize, redis: RedisConfig, count: int, progress: Progress) -> list[Measurement]:
    def steps(what: str) -> Callable[[], None]:
        task = progress.add_task(what, total=count)
        return lambda: progress.advance(task)

    works = [work for work in (size.even, size.uneven) if work is not None]
    async with open_setup(size.model, redis, longest=max(work.longest for work in works)) as setup:
        pairs = await in_pairs(setup.whole, setup.bare, size.even, count, steps(f"whole server, {setup.policy}"))
        figures = overhead(setup.policy, size.even, pairs)
        if size.uneven is not None:
            pairs = await in_pairs(setup.whole, setup.waves, size.uneven, count, steps(f"dispatch, {setup.policy}"))
            figures += dispatch(setup.policy, size.uneven, pairs)
    return figures
