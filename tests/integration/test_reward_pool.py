"""The reward pool with real worker processes: hangs, crashes, exceptions, and how fast it is."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from async_grpo.config.schema import RewardConfig
from async_grpo.errors import ConfigError
from async_grpo.rewards.pool import RewardPool

TRICKY = f"{Path(__file__).stem}:tricky"


@pytest.fixture(autouse=True)
def working_folder_has_the_verifier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)


def tricky(completion: str, answer: str) -> float:
    """A verifier that does what the completion says."""
    match completion:
        case "hang":
            time.sleep(60)
        case "crash":
            os._exit(7)
        case "raise":
            raise RuntimeError("cannot judge this")
        case "nan":
            return float("nan")
        case "print":
            print("a verifier that prints")
    return float(completion == answer)


def pool_of(*names: str, workers: int = 1, deadline_s: float = 0.5) -> RewardPool:
    return RewardPool([RewardConfig(name=name) for name in names], workers, deadline_s)


async def test_the_reward_is_the_weighted_sum_of_the_scores() -> None:
    functions = [RewardConfig(name="answer_tag", weight=2.0), RewardConfig(name="format", weight=0.5)]
    async with RewardPool(functions, 1, 5.0) as pool:
        right, bare = await pool.judge(
            [("<think>.</think><answer>3</answer>", "3"), ("<answer>3</answer>", "3")],
        )
    assert right.reward == 2.5
    assert bare.reward == 2.0
    assert bare.scores == {"answer_tag": 1.0, "format": 0.0}


async def test_a_verifier_that_hangs_is_killed_and_the_items_behind_it_are_judged() -> None:
    async with pool_of(TRICKY) as pool:
        started = time.monotonic()
        before, hung, after = await pool.judge([("a", "a"), ("hang", "a"), ("b", "a")])
        assert time.monotonic() - started < 20
    assert (before.reward, hung.reward, after.reward) == (1.0, None, 0.0)
    assert hung.failure == "deadline"
    assert "longer than 0.5 s" in hung.reason


async def test_a_verifier_that_crashes_costs_its_own_item_only() -> None:
    async with pool_of(TRICKY, deadline_s=5.0) as pool:
        crashed, after = await pool.judge([("crash", "a"), ("a", "a")])
        assert (crashed.failure, crashed.reward) == ("crash", None)
        assert "code 7" in crashed.reason
        assert after.reward == 1.0


async def test_an_exception_or_a_score_that_is_no_number_is_unverifiable_and_not_0() -> None:
    async with pool_of(TRICKY) as pool:
        raised, nan = await pool.judge([("raise", "a"), ("nan", "a")])
    assert (raised.failure, raised.reward) == ("error", None)
    assert "RuntimeError: cannot judge this" in raised.reason
    assert (nan.failure, nan.reward) == ("error", None)


async def test_what_a_verifier_prints_does_not_disturb_the_answers() -> None:
    async with pool_of(TRICKY) as pool:
        printed, after = await pool.judge([("print", "print"), ("a", "a")])
    assert (printed.reward, after.reward) == (1.0, 1.0)


async def test_the_event_loop_runs_on_while_a_verifier_hangs() -> None:
    async with pool_of(TRICKY) as pool:
        judging = asyncio.create_task(pool.judge([("hang", "a")]))
        longest = 0.0
        while not judging.done():
            before = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - before)
    assert longest < 0.3


async def test_a_judgement_that_is_cancelled_leaves_no_stale_answers_behind() -> None:
    async with pool_of(TRICKY, deadline_s=20.0) as pool:
        judging = asyncio.create_task(pool.judge([("a", "a"), ("hang", "a"), ("a", "a")]))
        await asyncio.sleep(0.2)
        judging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await judging
        (verdict,) = await pool.judge([("x", "y")])
    assert verdict.reward == 0.0


async def test_a_verifier_that_cannot_be_had_is_an_error_at_the_start() -> None:
    with pytest.raises(ConfigError, match="no_such_module"):
        await pool_of("no_such_module:score").start()


async def test_a_thousand_items_a_second_are_no_burden() -> None:
    items = [("<think>1+1</think><answer>2</answer>", "2")] * 16
    async with pool_of("answer_tag", "format", workers=2, deadline_s=10.0) as pool:
        started = time.monotonic()
        groups = await asyncio.gather(*(pool.judge(items) for _ in range(125)))
        seconds = time.monotonic() - started
    assert all(verdict.reward == 2.0 for group in groups for verdict in group)
    assert len(groups) * len(items) / seconds > 1000
