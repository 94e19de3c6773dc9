"""Reward pools for tests. Verifiers of this folder can be named with the fixture `verifiers_can_be_imported`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from async_grpo.config.rewards import RewardConfig, RewardsConfig
from async_grpo.rewards.base import RewardInput
from async_grpo.rewards.pool import RewardPool


def rewards_of(*names: str, **changes: Any) -> RewardsConfig:
    functions = [RewardConfig(name=name) for name in names]
    return RewardsConfig(**{"functions": functions, "deadline_s": 30.0, "memory_bytes": 128 << 20, **changes})


def pool_of(*names: str, **changes: Any) -> RewardPool:
    return RewardPool(rewards_of(*names, **changes))


def hanging_item(file: Path) -> RewardInput:
    """An item for `tricky_rewards:tricky`, which hangs; `file` appears when it does."""
    return RewardInput("announce and hang", "a", metadata={"file": str(file)})
