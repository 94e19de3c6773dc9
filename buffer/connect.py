"""From a configuration to a buffer and a board on a server that was checked."""

from __future__ import annotations

from redis.asyncio import Redis

from async_grpo.config.buffer import RedisConfig
from async_grpo.staleness.window import StalenessWindow
from buffer.redis.board import RedisBoard
from buffer.redis.buffer import RedisBuffer
from buffer.redis.client import check_server, make_client
from buffer.redis.keys import Keys
from buffer.redis.link import Link

_DELETE_AT_ONCE = 1000


async def connect(
    redis: RedisConfig, run: str, *, window: StalenessWindow, lease_s: float, max_attempts: int
) -> RedisBuffer:
    """The buffer of `run`, new or as it was left. Raises ServerLost, ServerRefused."""
    client = await _checked_client(redis)
    return await RedisBuffer.open(
        client, run, window=window, lease_s=lease_s, max_attempts=max_attempts, timeout_s=redis.timeout_s
    )


async def connect_board(redis: RedisConfig, run: str) -> RedisBoard:
    """The board of `run`. Raises ServerLost, ServerRefused."""
    return RedisBoard(await _checked_client(redis), run, timeout_s=redis.timeout_s)


async def knows_run(redis: RedisConfig, run: str) -> bool:
    """Whether the server holds anything of `run`; nothing is changed."""
    client = await _checked_client(redis)
    try:
        known: int = await Link(client, redis.timeout_s).call(lambda: client.exists(Keys(run).of("meta")))
        return bool(known)
    finally:
        await client.aclose()


async def wipe_run(redis: RedisConfig, run: str) -> int:
    """Delete everything that `run` has on the configured server; returns how many keys that was."""
    client = await _checked_client(redis)
    try:
        deleted: int = await Link(client, redis.timeout_s).call(lambda: wipe(client, run))
        return deleted
    finally:
        await client.aclose()


async def wipe(client: Redis, run: str) -> int:
    """Delete every key of `run`; returns how many there were."""
    names, deleted = [name async for name in client.scan_iter(match=Keys(run).pattern, count=_DELETE_AT_ONCE)], 0
    for start in range(0, len(names), _DELETE_AT_ONCE):
        deleted += await client.unlink(*names[start : start + _DELETE_AT_ONCE])
    return deleted


async def _checked_client(redis: RedisConfig) -> Redis:
    client = make_client(redis)
    try:
        await Link(client, redis.timeout_s).call(lambda: check_server(client))
    except BaseException:
        await client.aclose()
        raise
    return client
