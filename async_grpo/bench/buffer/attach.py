"""The one place where the bench opens a run of the buffer."""

from __future__ import annotations

from async_grpo.config.buffer import RedisConfig
from async_grpo.staleness.policy import ReplayPolicy
from async_grpo.staleness.window import StalenessWindow
from buffer import RedisBuffer, connect

LEASE_S = 60.0
MAX_ATTEMPTS = 3


async def attach(
    redis: RedisConfig, run: str, *, max_staleness: int, groups_per_step: int, horizon: int
) -> RedisBuffer:
    """The run, begun or joined: every process of a loop gives the same numbers."""
    window = StalenessWindow(max_staleness=max_staleness, groups_per_step=groups_per_step, horizon=horizon)
    policy = ReplayPolicy(window=window)
    return await connect(redis, run, policy=policy, lease_s=LEASE_S, max_attempts=MAX_ATTEMPTS)
