"""Completions made to be hard, through the real pool: each gets a verdict in time, and the event loop runs on.

An item is one completion under one verifier. The rules that compare texts must never need their deadline; algebra
may (a tower of powers has no other end), and then costs that item alone.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from async_grpo.config.rewards import RewardConfig, RewardsConfig
from async_grpo.rewards.base import RewardInput, RewardResult
from async_grpo.rewards.pool import RewardPool
from async_grpo.rewards.registry import ALGEBRA_VERIFIERS, BUILTIN
from tests.support.bait import baits

ALGEBRA = sorted(ALGEBRA_VERIFIERS)
TEXT = sorted(BUILTIN.keys() - ALGEBRA_VERIFIERS - {"kk_reward"})  # its references are no numbers
WORKERS = 2
TICK_S = 0.005


@dataclass
class Trial:
    """What came of it: verdicts in order, seconds of the longest item, turns and longest pause of the event loop."""

    verdicts: list[RewardResult] = field(default_factory=list)
    longest_s: float = 0.0
    turns: int = 0
    longest_pause_s: float = 0.0

    @property
    def failures(self) -> Counter[str]:
        return Counter(failure.kind for verdict in self.verdicts for failure in verdict.failures.values())


async def judge(names: Sequence[str], completions: Sequence[str], deadline_s: float) -> Trial:
    """Each completion under all of `names`, as many at a time as there are workers, so that none waits for a place."""
    functions = [RewardConfig(name=name) for name in names]
    trial, pool = Trial(), RewardPool(RewardsConfig(functions=functions, workers=WORKERS, deadline_s=deadline_s))
    waiting = iter(completions)

    async def work() -> None:
        for completion in waiting:
            started = time.monotonic()
            trial.verdicts += await pool.judge([RewardInput(completion, "18")])
            trial.longest_s = max(trial.longest_s, time.monotonic() - started)

    async def tick() -> None:
        while True:
            started = time.monotonic()
            await asyncio.sleep(TICK_S)
            trial.turns += 1
            trial.longest_pause_s = max(trial.longest_pause_s, time.monotonic() - started - TICK_S)

    async with pool:
        ticking = asyncio.create_task(tick())
        await asyncio.gather(*(work() for _ in range(WORKERS)))
        ticking.cancel()
    return trial


async def test_text_verifiers_score_every_bait_without_failures() -> None:
    completions = list(baits(80, seed=2))
    trial = await judge(TEXT, completions, deadline_s=20.0)
    assert len(trial.verdicts) == len(completions)
    assert trial.failures == {}
    assert all(set(verdict.scores) == set(TEXT) for verdict in trial.verdicts)


async def test_endless_algebra_is_killed_and_other_items_are_judged() -> None:
    bombs = ["\\boxed{9^{9^{9^{9}}}}", "\\boxed{100000!!!}"]
    trial = await judge(["math_verify", "math_17k_acc"], [*bombs, "\\boxed{18}", *bombs, "\\boxed{17}"], deadline_s=2.0)
    by_kind = Counter((verdict.failure, verdict.reward) for verdict in trial.verdicts)
    assert by_kind == {("timeout", None): 4, ("", 2.0): 1, ("", 0.0): 1}
    assert trial.turns > 100


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("names", [[name] for name in ALGEBRA] + [TEXT], ids=lambda names: names[0])
async def test_ten_thousand_baits_take_less_than_two_seconds_each(names: list[str]) -> None:
    """Every completion under every rule for texts, and under one of the symbolic verifiers, in turn."""
    completions = list(baits(10_000, seed=3))
    if names != TEXT:
        completions = completions[ALGEBRA.index(names[0]) :: len(ALGEBRA)]
    started = time.monotonic()
    trial = await judge(names, completions, deadline_s=1.0 if names != TEXT else 2.0)
    elapsed_s = time.monotonic() - started
    print(
        f"\n{', '.join(names)}: {len(completions)} items in {elapsed_s:.0f} s, longest "
        f"{trial.longest_s:.2f} s, longest pause of the loop {trial.longest_pause_s:.3f} s, {dict(trial.failures)}"
    )
    assert len(trial.verdicts) == len(completions)
    # A symbolic verifier gives no score to what it cannot evaluate, and hangs on some algebra.
    assert set(trial.failures) <= ({"timeout", "none"} if names != TEXT else set())
    assert trial.longest_s - trial.longest_pause_s < 2.0  # while this process has no processor, it sees no verdict
    assert trial.turns > 20 * elapsed_s
