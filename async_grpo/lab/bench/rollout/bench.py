"""The bench of the rollout server on a real engine.

    one engine <-- the whole server   tickets from a real Valkey, rewards from real processes, groups back into it
               <-- bare vLLM          the same requests from a plain loop (`bare_vllm`)

- overhead   of the whole server: tokens a second beside bare vLLM, with a model that keeps the engine busy, and
             with one of the quickstart's size, whose tokens cost Python more than the engine
- dispatch   where lengths differ much: completions that start as slots become free, beside waves

The weights stand still and nothing is evaluated. Figures of one invocation can be compared; figures of two machines, or
of a busy one, cannot.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from rich.progress import Progress

from async_grpo.config.buffer import RedisConfig
from async_grpo.config.model import TinyQwen2Config
from async_grpo.lab.bench.measure import (
    Measurement,
    Spread,
    Step,
    add_progress_bar,
    measure_load_average,
    measure_pairs,
)
from async_grpo.lab.bench.rig import bench_server
from async_grpo.lab.bench.rollout.server_round import open_setup
from async_grpo.lab.bench.rollout.workload import LogNormal, RolloutRound, RolloutWork, Uniform
from async_grpo.telemetry.logging import configure_logging

BARE = "bare AsyncLLM, same requests"
WAVES = "bare AsyncLLM in waves, same requests"
PAIRS = 3

LARGE = TinyQwen2Config(hidden_size=640, layers=12, heads=10, kv_heads=2, intermediate_size=1792)
"""56 million parameters, with a vocabulary of 4,096."""
TINY = TinyQwen2Config(hidden_size=128, layers=2, heads=4, kv_heads=2, intermediate_size=384)
"""A model of the quickstart's size."""
STEADY = RolloutWork(groups=20, group_size=8, groups_per_step=4, concurrency=32, lengths=Uniform(32, 96))
"""Some 20 s on two cores."""
UNEVEN = RolloutWork(groups=24, group_size=8, groups_per_step=4, concurrency=32, lengths=LogNormal(24, 1.2, 384))
"""Half of the completions have at most 24 tokens, the longest of 32 some nine times as many."""
SHORT = RolloutWork(
    groups=128, group_size=16, groups_per_step=16, concurrency=96, lengths=Uniform(20, 40), prompt_tokens=8
)
"""Completions as the quickstart has them."""

Feeder = Callable[[RolloutWork], Awaitable[RolloutRound]]
"""Does the work of one round."""
Pairs = list[tuple[RolloutRound, RolloutRound]]
"""Rounds of the whole server and of its baseline, all with the same work."""


@dataclass(frozen=True, slots=True)
class RolloutBenchSize:
    """A model and the work that is measured with it. `uneven`: the work of dispatch beside waves."""

    model: TinyQwen2Config
    vocabulary: int
    even: RolloutWork
    uneven: RolloutWork | None = None


FULL = (RolloutBenchSize(LARGE, 4096, STEADY, UNEVEN), RolloutBenchSize(TINY, 32, SHORT))
QUICK = (
    RolloutBenchSize(
        TINY,
        32,
        replace(SHORT, groups=16, lengths=Uniform(4, 8)),
        replace(UNEVEN, groups=8, lengths=LogNormal(8, 1.0, 64)),
    ),
)


async def measure(progress: Progress, *, quick: bool) -> list[Measurement]:
    """All figures. `quick` only shows that the bench works, with the tiny model alone."""
    configure_logging("bench")
    figures: list[Measurement] = []
    with bench_server(None) as redis:
        for size in QUICK if quick else FULL:
            figures += await _measure(size, redis, 1 if quick else PAIRS, progress)
    return [*figures, measure_load_average()]


async def _measure(size: RolloutBenchSize, redis: RedisConfig, count: int, progress: Progress) -> list[Measurement]:
    longest = max(work.longest for work in (size.even, size.uneven) if work is not None)
    async with open_setup(size.model, size.vocabulary, redis, longest=longest) as setup:
        step = add_progress_bar(progress, f"whole server, {setup.policy}", count)
        figures = overhead(setup.policy, size.even, await in_pairs(setup.whole, setup.bare, size.even, count, step))
        if size.uneven is not None:
            step = add_progress_bar(progress, f"dispatch, {setup.policy}", count)
            pairs = await in_pairs(setup.whole, setup.waves, size.uneven, count, step)
            figures += dispatch(setup.policy, size.uneven, pairs)
    return figures


async def in_pairs(whole: Feeder, baseline: Feeder, work: RolloutWork, count: int, step: Step) -> Pairs:
    """`count` pairs in alternating order, after a short round of each that warms up; `step` is called after every pair.

    Raises EngineError if a round did not make exactly the tokens of `work`.
    """

    async def checked(feeder: Feeder, work: RolloutWork) -> RolloutRound:
        done = await feeder(work)
        work.check(done.tokens)
        return done

    for feeder in (whole, baseline):
        await checked(feeder, replace(work, groups=work.groups_per_step))
    return await measure_pairs(partial(checked, whole, work), partial(checked, baseline, work), count, step)


def overhead(policy: str, work: RolloutWork, pairs: Pairs) -> list[Measurement]:
    """Figures of the whole server: its speed beside bare vLLM, and its CPU time in Python."""
    name = f"whole server, {policy}"
    used, used_by_bare = (median(one.cpu_us_per_token for one in rounds) for rounds in zip(*pairs, strict=True))
    cpu = Measurement(f"{name}: CPU time of its process", used, "us/token", used_by_bare, BARE, used / used_by_bare)
    return [*_speed(name, work, BARE, pairs), cpu]


def dispatch(policy: str, work: RolloutWork, pairs: Pairs) -> list[Measurement]:
    """Figures of continuous dispatch: what it gains to start a completion whenever a slot is free."""
    return _speed(f"continuous dispatch, {policy}", work, WAVES, pairs)


def _speed(name: str, work: RolloutWork, baseline: str, pairs: Pairs) -> list[Measurement]:
    speeds = [(ours.tokens_per_s, theirs.tokens_per_s) for ours, theirs in pairs]
    ratios = Spread.of(*zip(*speeds, strict=True))
    tokens, tokens_of_baseline = (sum(one.tokens) for one in pairs[0])
    asked = f"{work.concurrency} in flight, {work.lengths}"
    return [
        Measurement.paired(f"{name}, {asked}", "tokens/s", speeds, baseline),
        Measurement(f"{name}: lowest of {len(speeds)} ratios", ratios.lowest, "x"),
        Measurement(f"{name}: highest of {len(speeds)} ratios", ratios.highest, "x"),
        Measurement(f"{name}: tokens of a round", tokens, "tokens", tokens_of_baseline, "asserted to be the same"),
    ]
