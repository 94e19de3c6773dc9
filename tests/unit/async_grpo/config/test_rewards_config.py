"""The configuration of rewards: what is refused, and how it says so."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from async_grpo.config.rewards import HttpRewardConfig, RewardsConfig
from tests.support.rollout_fakes import config_of


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ({"functions": [{"name": "format"}, {"name": "format", "weight": 2}]}, "format stands twice"),
        ({"functions": [{"name": "format", "required": False}]}, "none is required"),
        ({"functions": [{"name": "overlong"}]}, "the name of the punishment of length"),
        ({"functions": [{"name": "format", "weight": float("nan")}]}, "finite number"),
        ({"overlong": "soft"}, "soft_overlong_tokens is None"),
        ({"overlong": "filter", "soft_overlong_tokens": 4}, "with overlong: soft, and only then"),
        ({"environment": ["A=b"]}, "should match pattern"),
        ({"memory_bytes": 1 << 20}, "greater than or equal"),
        ({"overlong": "soft", "soft_overlong_tokens": 8}, r"\(8\) is not below sampling.max_tokens \(8\)"),
    ],
)
def test_what_cannot_work_is_refused(rewards: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config_of(rewards=rewards)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "ftp://judge/"}, "no http:// or https:// address"),
        ({"url": "file:///etc/passwd"}, "no http:// or https:// address"),
        ({"url": "judge:80"}, "no http:// or https:// address"),
        ({"url": "http://user:password@judge/"}, "name that in token_env"),
        ({"url": "http://judge/", "score_pointer": "score"}, "Begin it with /"),
        ({"url": "http://judge/", "token_env": "Bearer abc"}, "should match pattern"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        HttpRewardConfig(**settings)


def test_the_same_configuration_comes_back_from_its_dump() -> None:
    rewards = RewardsConfig.model_validate(
        {"functions": [{"name": "gsm8k"}, {"name": "judge", "weight": 0.5, "http": {"url": "https://judge/v1"}}]}
    )
    assert RewardsConfig.model_validate(rewards.model_dump(mode="json")) == rewards
