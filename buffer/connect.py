"""From a configuration to the buffer and the board of a run, on a server that was checked."""

from __future__ import annotations

from typing import Any

from async_grpo.config import RunConfig
from async_grpo.config.buffer import RedisConfig
from async_grpo.staleness import ReplayPolicy
from buffer.base import ReplayBuffer, RunBoard
from buffer.capacity import memory_plan
from buffer.redis.board import RedisBoard
from buffer.redis.buffer import RedisBuffer
from buffer.redis.client import check_server, make_client
from buffer.redis.retrying import RetryingClient, close
from buffer.redis.scripts import RunKeys

_LOOK_AT_ONCE = 1000


async def connect(
    redis: RedisConfig, run: str, *, policy: ReplayPolicy, lease_s: float, max_attempts: int
) -> RedisBuffer:
    """The buffer of `run`, new or as it was left. Raises ServerLost, ServerRefused."""
    client = await _checked_client(redis, run)
    try:
        return await RedisBuffer.open(
            client, run, policy=policy, lease_s=lease_s, max_attempts=max_attempts, timeout_s=redis.timeout_s
        )
    except BaseException:
        await close(client)
        raise


def attach(redis: RedisConfig, run: str) -> RedisBuffer:
    """The buffer of a run that somebody else has opened, to look at it: nothing is checked, and nothing is written.
    It connects when first used."""
    return RedisBuffer(RetryingClient(make_client(redis, run), redis.timeout_s), run)


async def connect_board(redis: RedisConfig, run: str) -> RedisBoard:
    """The board of `run`. Raises ServerLost, ServerRefused."""
    return RedisBoard(await _checked_client(redis, run), run, timeout_s=redis.timeout_s)


async def memory_limit(redis: RedisConfig, run: str) -> int:
    """The server's maxmemory in bytes, or else the memory of its machine; 0 if it tells neither."""
    client = await _checked_client(redis, run)
    try:
        about = await RetryingClient(client, redis.timeout_s).call(lambda: client.info("memory"))
        return int(about.get("maxmemory") or about.get("total_system_memory") or 0)
    finally:
        await close(client)


async def knows_run(redis: RedisConfig, run: str) -> bool:
    """Whether the server holds anything of `run`; nothing is changed."""
    client = await _checked_client(redis, run)
    try:
        known: int = await RetryingClient(client, redis.timeout_s).call(lambda: client.exists(RunKeys(run).of("meta")))
        return bool(known)
    finally:
        await close(client)


async def wipe_run(redis: RedisConfig, run: str) -> int:
    """Delete everything that `run` has on the configured server; returns how many keys that was."""
    client = await _checked_client(redis, run)
    try:
        return await wipe(client, run, timeout_s=redis.timeout_s)
    finally:
        await close(client)


async def wipe(client: Any, run: str, *, timeout_s: float = 30.0) -> int:
    """Delete every key of `run`; returns how many there were. `timeout_s`: for one page of keys.

    It ends with a pass that finds nothing: a failover in the middle of a pass may hide keys from it.
    """
    link, deleted = RetryingClient(client, timeout_s), 0
    while found := await _wipe_once(link, run):
        deleted += found
    return deleted


async def _wipe_once(link: RetryingClient, run: str) -> int:
    cursor, deleted = 0, 0
    while True:
        cursor, names = await link.call(
            lambda at=cursor: link.client.scan(at, match=RunKeys(run).pattern, count=_LOOK_AT_ONCE)  # type: ignore[misc]
        )
        if names:
            deleted += await link.call(lambda page=names: link.client.unlink(*page))  # type: ignore[misc]
        if cursor == 0:
            return deleted


async def _checked_client(redis: RedisConfig, run: str) -> Any:
    client = make_client(redis, run)
    try:
        await RetryingClient(client, redis.timeout_s).call(lambda: check_server(client))
    except BaseException:
        await close(client)
        raise
    return client


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
