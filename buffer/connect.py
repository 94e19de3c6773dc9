"""From a configuration to a buffer and a board that are connected, checked and attached to a run."""

from __future__ import annotations

from async_grpo.config.schema import RedisConfig
from async_grpo.staleness.window import StalenessWindow
from buffer.redis import RedisBoard, RedisBuffer
from buffer.redis.client import check_server, make_client, where
from buffer.redis.keys import Keys

_DELETE_AT_ONCE = 1000


async def connect(
    redis: RedisConfig, run: str, *, window: StalenessWindow, lease_s: float, max_attempts: int
) -> RedisBuffer:
    """The buffer of `run`, new or as it was left. Raises ServerRefused, ServerLost."""
    await _check(redis)
    buffer = RedisBuffer.over(redis, run)
    await buffer.attach(window, lease_s=lease_s, max_attempts=max_attempts)
    return buffer


async def connect_board(redis: RedisConfig, run: str) -> RedisBoard:
    """The board of `run`. Raises ServerRefused, ServerLost."""
    await _check(redis)
    return RedisBoard.over(redis, run)


async def wipe_run(redis: RedisConfig, run: str) -> int:
    """Delete every key of `run`; returns how many there were."""
    client = make_client(redis)
    try:
        deleted = 0
        names = []
        async for name in client.scan_iter(match=Keys(run)() + "*", count=_DELETE_AT_ONCE):
            names.append(name)
            if len(names) == _DELETE_AT_ONCE:
                deleted += await client.unlink(*names)
                names.clear()
        return deleted + (await client.unlink(*names) if names else 0)
    finally:
        await client.aclose()


async def _check(redis: RedisConfig) -> None:
    client = make_client(redis)
    try:
        await check_server(client, where(redis.url))
    finally:
        await client.aclose()
