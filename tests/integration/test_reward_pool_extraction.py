"""Extracting answers in real worker processes: as safe as judging, and a failure costs the answer alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from async_grpo.config.rewards import HttpRewardConfig, RewardConfig, RewardsConfig
from async_grpo.errors import AsyncGrpoError
from async_grpo.rewards.item import Item
from async_grpo.rewards.pool import RewardPool

SUPPORT = Path(__file__).parents[1] / "support"
WILD = "wild_extraction:score"


@pytest.fixture(autouse=True)
def verifiers_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))


def pool_of(*names: str, **changes: Any) -> RewardPool:
    functions = [RewardConfig(name=name) for name in names]
    return RewardPool(RewardsConfig(**{"functions": functions, "deadline_s": 30.0, **changes}))


async def test_answers_are_extracted_by_the_reward_function_that_is_named() -> None:
    async with pool_of("format", "gsm8k", workers=2) as pool:
        assert pool.why_no_answers("gsm8k") == ""
        assert "format does not say" in pool.why_no_answers("format")
        assert await pool.extract("gsm8k", ["#### 1,800", "so 9.", "none"]) == ["1800", "9", None]
        (verdict,) = await pool.judge([Item("#### 18", "18")])
        assert verdict.scores == {"format": 0.0, "gsm8k": 1.0}


async def test_a_judge_behind_http_has_no_answers() -> None:
    functions = [RewardConfig(name="judge", http=HttpRewardConfig(url="http://127.0.0.1:1"))]
    async with RewardPool(RewardsConfig(functions=functions)) as pool:
        assert "behind HTTP" in pool.why_no_answers("judge")


async def test_an_extraction_that_fails_costs_the_answer_and_is_counted() -> None:
    async with pool_of(WILD, deadline_s=3.0) as pool:
        wanted = ["fine", "raise", "number", "crash", "nothing", "long", "fine"]
        assert await pool.extract(WILD, wanted) == ["FINE", None, None, None, None, None, "FINE"]
        assert pool.failures == Counter({(WILD, "extraction"): 2, (WILD, "crashed"): 1})
        assert pool.judged == 0


async def test_an_extraction_that_hangs_is_killed_and_judging_goes_on() -> None:
    async with pool_of(WILD, deadline_s=1.5) as pool:
        assert await pool.extract(WILD, ["hang", "fine"]) == [None, "FINE"]
        assert pool.failures == Counter({(WILD, "timeout"): 1})
        (verdict,) = await pool.judge([Item("hang", "x")])
        assert verdict.reward == 1.0


async def test_a_closed_pool_extracts_nothing() -> None:
    async with pool_of("gsm8k") as pool:
        pass
    with pytest.raises(AsyncGrpoError, match="closed"):
        await pool.extract("gsm8k", ["#### 1"])
