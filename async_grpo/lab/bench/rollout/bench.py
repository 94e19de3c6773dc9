"""The bench of the rollout server on a real engine.

    one engine <-- the whole server   tickets from a real Valkey, rewards from real processes, groups back into it
               <-- bare vLLM          the same requests from a plain loop (`bare_vllm`)

- overhead   of the whole server: tokens per second compared with bare vLLM, for a model that keeps the engine busy and
             for one of the quickstart's size, whose tokens cost Python more than the engine
- dispatch   for lengths that vary widely: completions that start when slots become free, compared with waves
- truncation of the whole server: tokens per second and bytes per token, compared with the whole distribution; only with
             `truncated`. A random model keeps nearly top_k tokens, a trained one fewer

The weights do not change and nothing is evaluated. Results of one invocation are comparable; results of two machines,
or of a busy one, are not.
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
from rollout_server.engines.base import Truncation

BARE = "bare AsyncLLM, same requests"
WAVES = "bare AsyncLLM in waves, same requests"
WHOLE = "whole distribution, same requests"
TRUNCATION = Truncation(top_k=20, top_p=0.8, repetition_penalty=1.05)
PAIRS = 3

LARGE = TinyQwen2Config(hidden_size=640, layers=12, heads=10, kv_heads=2, intermediate_size=1792)
"""56 million parameters, with a vocabulary of 4,096."""
TINY = TinyQwen2Config(hidden_size=128, layers=2, heads=4, kv_heads=2, intermediate_size=384)
"""A model of the quickstart's size."""
STEADY = RolloutWork(groups=20, group_size=8, groups_per_step=4, concurrency=32, lengths=Uniform(32, 96))
"""About 20 s on two cores."""
UNEVEN = RolloutWork(groups=24, group_size=8, groups_per_step=4, concurrency=32, lengths=LogNormal(24, 1.2, 384))
"""Half of the completions have at most 24 tokens, the longest of 32 about nine times as many."""
SHORT = RolloutWork(
    groups=128, group_size=16, groups_per_step=16, concurrency=96, lengths=Uniform(20, 40), prompt_tokens=8
)
"""Completions as in the quickstart."""

RunRound = Callable[[RolloutWork], Awaitable[RolloutRound]]
"""Runs the work of one round."""
Pairs = list[tuple[RolloutRound, RolloutRound]]
"""Rounds of the whole server and of its baseline, all with the same work."""


@dataclass(frozen=True, slots=True)
class RolloutBenchSize:
    """A model and the work that is measured with it. `uneven`: the work that compares dispatch with waves."""

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


async def measure(progress: Progress, *, quick: bool, truncated: bool = False) -> list[Measurement]:
    """Run the bench. `quick` only checks that it works, on the tiny model. `truncated`: also measure TRUNCATION."""
    configure_logging("bench")
    measurements: list[Measurement] = []
    with bench_server(None) as redis:
        for size in QUICK if quick else FULL:
            measurements += await _run_size(size, redis, 1 if quick else PAIRS, progress, truncated=truncated)
    return [*measurements, measure_load_average()]


async def _run_size(
    size: RolloutBenchSize, redis: RedisConfig, count: int, progress: Progress, *, truncated: bool
) -> list[Measurement]:
    longest = max(work.longest for work in (size.even, size.uneven) if work is not None)
    async with open_setup(size.model, size.vocabulary, redis, longest=longest) as setup:
        step = add_progress_bar(progress, f"whole server, {setup.policy}", count)
        pairs = await run_pairs(setup.run_server_round, setup.run_bare_round, size.even, count, step)
        measurements = measure_overhead(setup.policy, size.even, pairs)
        if size.uneven is not None:
            step = add_progress_bar(progress, f"dispatch, {setup.policy}", count)
            pairs = await run_pairs(setup.run_server_round, setup.run_wave_round, size.uneven, count, step)
            measurements += measure_dispatch(setup.policy, size.uneven, pairs)
        if truncated:

            async def run_truncated_round(work: RolloutWork) -> RolloutRound:
                return await setup.run_server_round(replace(work, truncation=TRUNCATION))

            step = add_progress_bar(progress, f"truncated sampling, {setup.policy}", count)
            pairs = await run_pairs(run_truncated_round, setup.run_server_round, size.even, count, step)
            measurements += measure_truncation(setup.policy, size.even, pairs)
    return measurements


async def run_pairs(whole: RunRound, baseline: RunRound, work: RolloutWork, count: int, step: Step) -> Pairs:
    """Run `count` pairs in alternating order after a short warm-up round of each; `step` is called after every pair.

    Raises EngineError if a round did not generate exactly the tokens of `work`.
    """

    async def checked(run_round: RunRound, work: RolloutWork) -> RolloutRound:
        result = await run_round(work)
        work.check_lengths(result.tokens)
        return result

    for run_round in (whole, baseline):
        await checked(run_round, replace(work, groups=work.groups_per_step))
    return await measure_pairs(partial(checked, whole, work), partial(checked, baseline, work), count, step)


def measure_overhead(policy: str, work: RolloutWork, pairs: Pairs) -> list[Measurement]:
    """Compare speed and CPU time of the whole server with bare vLLM."""
    name = f"whole server, {policy}"
    server_us = median(server.cpu_us_per_token for server, _ in pairs)
    bare_us = median(bare.cpu_us_per_token for _, bare in pairs)
    cpu = Measurement(f"{name}: CPU time of its process", server_us, "us/token", bare_us, BARE, server_us / bare_us)
    return [*_compare_speed(name, work, BARE, pairs), cpu]


def measure_dispatch(policy: str, work: RolloutWork, pairs: Pairs) -> list[Measurement]:
    """Measure the gain from starting a completion whenever a slot is free."""
    return _compare_speed(f"continuous dispatch, {policy}", work, WAVES, pairs)


def measure_truncation(policy: str, work: RolloutWork, pairs: Pairs) -> list[Measurement]:
    """Compare speed and bytes of truncated sampling with the whole distribution."""
    name = f"truncated sampling, {policy}"
    truncated, whole = pairs[0]
    sizes = (truncated.bytes_per_token, whole.bytes_per_token)
    return [
        *_compare_speed(name, work, WHOLE, pairs),
        Measurement.paired(f"{name}: group records", "bytes/token", [sizes], WHOLE),
        Measurement(f"{name}: kept tokens, {TRUNCATION}", truncated.kept_per_token, "per position"),
    ]


def _compare_speed(name: str, work: RolloutWork, baseline: str, pairs: Pairs) -> list[Measurement]:
    speeds = [(ours.tokens_per_s, theirs.tokens_per_s) for ours, theirs in pairs]
    ratios = Spread.of(*zip(*speeds, strict=True))
    first_server, first_baseline = pairs[0]
    setup = f"{work.concurrency} in flight, {work.lengths}"
    return [
        Measurement.paired(f"{name}, {setup}", "tokens/s", speeds, baseline),
        Measurement(f"{name}: lowest of {len(speeds)} ratios", ratios.lowest, "x"),
        Measurement(f"{name}: highest of {len(speeds)} ratios", ratios.highest, "x"),
        Measurement(
            f"{name}: tokens of a round",
            sum(first_server.tokens),
            "tokens",
            sum(first_baseline.tokens),
            "asserted to be the same",
        ),
    ]
