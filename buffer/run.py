"""The buffer that a configuration describes, and whether its run is over."""

from __future__ import annotations

from async_grpo.config import RunConfig
from buffer.board import RunBoard
from buffer.capacity import memory_plan
from buffer.connect import connect, memory_limit
from buffer.protocol import ReplayBuffer
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


async def is_over(config: RunConfig, buffer: ReplayBuffer, board: RunBoard) -> bool:
    """Whether rollout servers have nothing left to do: every step is trained and the final policy is measured (its
    probe comes before its evaluation). The trainer may still have to read both, and to export."""
    evaluated = any(evaluation.version >= config.steps for evaluation in await board.evaluations())
    return evaluated and (await buffer.stats()).ended
