"""Extracting answers in real worker processes: as safe as judging, and a failure costs the answer alone."""

from __future__ import annotations

from collections import Counter

import pytest

from async_grpo.config.rewards import HttpRewardConfig, RewardConfig, RewardsConfig
from async_grpo.errors import AsyncGrpoError
from async_grpo.rewards.base import RewardFailure, RewardInput
from async_grpo.rewards.pool import RewardPool
from tests.support.reward_pools import pool_of

WILD = "wild_extraction:score"

pytestmark = pytest.mark.usefixtures("verifiers_can_be_imported")


async def found(pool: RewardPool, *completions: str) -> list[str | None]:
    """Answers; of an extraction that failed its kind, in brackets."""
    answers = await pool.extract(WILD, completions)
    return [f"({answer.kind})" if isinstance(answer, RewardFailure) else answer for answer in answers]


async def test_answers_are_extracted_by_the_reward_function_that_is_named() -> None:
    async with pool_of("format", "gsm8k", workers=2) as pool:
        assert pool.why_no_answers("gsm8k") == ""
        assert "format does not say" in pool.why_no_answers("format")
        assert await pool.extract("gsm8k", ["#### 1,800", "so 9.", "none"]) == ["1800", "9", None]
        (verdict,) = await pool.judge([RewardInput("#### 18", "18")])
        assert verdict.scores == {"format": 0.0, "gsm8k": 1.0}


async def test_a_judge_behind_http_has_no_answers() -> None:
    functions = [RewardConfig(name="judge", http=HttpRewardConfig(url="http://127.0.0.1:1"))]
    async with RewardPool(RewardsConfig(functions=functions)) as pool:
        assert "behind HTTP" in pool.why_no_answers("judge")


async def test_an_extraction_that_fails_costs_the_answer_says_why_and_is_counted() -> None:
    async with pool_of(WILD, deadline_s=3.0) as pool:
        answers = await found(pool, "fine", "raise", "number", "crash", "nothing", "long", "fine")
        assert answers == ["FINE", "(extraction)", "(extraction)", "(crashed)", None, None, "FINE"]
        (failure,) = await pool.extract(WILD, ["raise"])
        assert failure == RewardFailure("extraction", "ValueError: no")
        assert pool.failures == Counter({(WILD, "extraction"): 3, (WILD, "crashed"): 1})
        assert pool.judged == 0


async def test_an_extraction_that_hangs_is_killed_and_judging_goes_on() -> None:
    async with pool_of(WILD, deadline_s=1.5) as pool:
        assert await found(pool, "hang", "fine") == ["(timeout)", "FINE"]
        assert pool.failures == Counter({(WILD, "timeout"): 1})
        (verdict,) = await pool.judge([RewardInput("hang", "x")])
        assert verdict.reward == 1.0


async def test_a_closed_pool_extracts_nothing() -> None:
    async with pool_of("gsm8k") as pool:
        pass
    with pytest.raises(AsyncGrpoError, match="closed"):
        await pool.extract("gsm8k", ["#### 1"])
