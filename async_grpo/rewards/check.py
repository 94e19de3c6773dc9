"""Looks at the reward functions before anything starts, in a process of their own."""

from __future__ import annotations

import asyncio

from async_grpo.config.rewards import RewardsConfig
from async_grpo.rewards.pool import RewardPool
from async_grpo.rewards.resolve import BUILTIN, NEED_PACKAGES

_NEED_NO_TRIAL = BUILTIN.keys() - NEED_PACKAGES


def check_rewards(rewards: RewardsConfig) -> None:
    """Raise ConfigError for a name that is none, a verifier that cannot be imported or called, or a token or
    variable of the environment that is not set. Must not be called from a running event loop."""
    asyncio.run(_check(rewards.model_copy(update={"workers": 1})))


async def _check(rewards: RewardsConfig) -> None:
    pool = RewardPool(rewards)
    if any(function.http is None and function.name not in _NEED_NO_TRIAL for function in rewards.functions):
        async with pool:
            pass
