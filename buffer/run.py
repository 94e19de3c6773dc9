"""The buffer that a configuration describes."""

from __future__ import annotations

from async_grpo.config import RunConfig
from buffer.capacity import memory_plan
from buffer.connect import connect, memory_limit
from buffer.redis.buffer import RedisBuffer


async def open_run(config: RunConfig) -> RedisBuffer:
    """The buffer of the run, new or as it was left. Raises ServerLost, ServerRefused, and ConfigError if the
    server's memory would not last."""
    memory_plan(config).check(await memory_limit(config.redis, config.name), "the server at redis.url")
    return await connect(
        config.redis,
        config.name,
        policy=config.replay_policy,
        lease_s=config.lease_s,
        max_attempts=config.rollout.max_attempts,
    )
