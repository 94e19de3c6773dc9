"""Connects to the buffer and the board of a configured run, on a server that was checked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from async_grpo.config import RunConfig
from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import ServerRefused
from async_grpo.staleness import ReplayPolicy
from buffer.base import ReplayBuffer, RunBoard
from buffer.capacity import NO_QUOTA, MemoryQuota, plan_buffer_memory
from buffer.redis.board import RedisBoard
from buffer.redis.buffer import RedisBuffer
from buffer.redis.client import check_server, make_client
from buffer.redis.retrying import RetryingClient, close_client
from buffer.redis.scripts import RunKeys

_KEYS_PER_SCAN = 1000


async def connect(
    redis: RedisConfig,
    run: str,
    *,
    policy: ReplayPolicy,
    lease_s: float,
    max_attempts: int,
    quota: MemoryQuota = NO_QUOTA,
) -> RedisBuffer:
    """Open the buffer of `run`, new or existing. Raises ServerLost, ServerRefused."""
    client = await _checked_client(redis, run)
    try:
        return await RedisBuffer.open(
            client,
            run,
            policy=policy,
            lease_s=lease_s,
            max_attempts=max_attempts,
            quota=quota,
            timeout_s=redis.timeout_s,
        )
    except BaseException:
        await close_client(client)
        raise


def attach(redis: RedisConfig, run: str) -> RedisBuffer:
    """Return the buffer of a run that another process has opened, for reading.

    It neither checks the server nor writes anything, and connects at first use.
    """
    return RedisBuffer(RetryingClient(make_client(redis, run), redis.timeout_s), run)


def attach_board(redis: RedisConfig, run: str) -> RedisBoard:
    """Return the board of a run, for reading. It does not check the server, and connects at first use."""
    return RedisBoard(make_client(redis, run), run, timeout_s=redis.timeout_s)


async def connect_board(redis: RedisConfig, run: str) -> RedisBoard:
    """Return the board of `run`. Raises ServerLost, ServerRefused."""
    return RedisBoard(await _checked_client(redis, run), run, timeout_s=redis.timeout_s)


async def check_memory(config: RunConfig) -> None:
    """Raise ConfigError if the server has too little memory for this run and the other runs on it.

    The other runs do not count if this run has reserved its memory before: they were checked against it.
    """
    run = config.name
    plan = plan_buffer_memory(config)
    async with _checked_link(config.redis, run) as link:
        info = await link.call(lambda: link.client.info("memory"))
        reserved_before = await link.call(lambda: link.client.hget(RunKeys(run).key("meta"), "reserved_bytes"))
        others: dict[str, int] = {}
        if int(reserved_before or 0) < plan.quota.reserved_bytes:
            others = await _reserved_by_others(link, run)
    limit_bytes = int(info.get("maxmemory") or info.get("total_system_memory") or 0)
    plan.check(limit_bytes, "the server at redis.url", others)


async def _reserved_by_others(link: RetryingClient, run: str) -> dict[str, int]:
    """Return run -> bytes for the other runs that this user may read: their reservation, or the rest of an ended
    run."""
    fields = ["reserved_bytes", "stored_bytes", "ended"]
    sizes: dict[str, int] = {}
    try:
        async for names in _scan_keys(link, RunKeys("*").key("meta")):
            for name in names:
                reserved, stored, ended = await link.call(partial(link.client.hmget, name, fields))
                size = int((stored if ended == b"1" else reserved) or 0)
                other = RunKeys.run_of_key(name.decode())
                if other != run and size > 0:
                    sizes[other] = size
    except ServerRefused:  # this user may read its own run only
        return {}
    return sizes


async def run_exists(redis: RedisConfig, run: str) -> bool:
    """True if the server has data of `run`."""
    async with _checked_link(redis, run) as link:
        return bool(await link.call(lambda: link.client.exists(RunKeys(run).key("meta"))))


async def wipe_run(redis: RedisConfig, run: str) -> int:
    """Delete all keys of `run` on the configured server. Returns their number."""
    async with _checked_link(redis, run) as link:
        return await wipe(link.client, run, timeout_s=redis.timeout_s)


async def wipe(client: Any, run: str, *, timeout_s: float = 30.0) -> int:
    """Delete all keys of `run`. Returns their number. `timeout_s` limits the work on one page of keys."""
    link = RetryingClient(client, timeout_s)
    total = 0
    # Repeat until a pass finds nothing, because a failover during a pass may hide keys from it.
    while deleted := await _wipe_once(link, run):
        total += deleted
    return total


async def _wipe_once(link: RetryingClient, run: str) -> int:
    deleted = 0
    async for names in _scan_keys(link, RunKeys(run).pattern):
        deleted += await link.call(partial(link.client.unlink, *names))
    return deleted


async def _scan_keys(link: RetryingClient, pattern: str) -> AsyncIterator[list[bytes]]:
    """Yield the matching keys of the server in pages; a key may occur twice."""
    cursor: int | None = None
    while cursor != 0:
        cursor, names = await link.call(partial(link.client.scan, cursor or 0, match=pattern, count=_KEYS_PER_SCAN))
        if names:
            yield names


async def open_run(config: RunConfig) -> RedisBuffer:
    """Open the buffer of the run, new or existing.

    Raises ServerLost, ServerRefused, and ConfigError if the server has too little memory for the run.
    """
    await check_memory(config)
    return await connect(
        config.redis,
        config.name,
        policy=config.replay_policy,
        lease_s=config.lease_s,
        max_attempts=config.rollout.max_attempts,
        quota=plan_buffer_memory(config).quota,
    )


async def is_run_over(config: RunConfig, buffer: ReplayBuffer, board: RunBoard) -> bool:
    """True if rollout servers have no work left: every step is trained and the final policy is evaluated.

    The probe of the final policy is published before its evaluation. The trainer may still have to read both, and to
    export.
    """
    evaluations = await board.evaluations()
    if not any(evaluation.version >= config.steps for evaluation in evaluations):
        return False
    return (await buffer.stats()).ended


@asynccontextmanager
async def _checked_link(redis: RedisConfig, run: str) -> AsyncIterator[RetryingClient]:
    """A client of a checked server for a few calls."""
    link = RetryingClient(await _checked_client(redis, run), redis.timeout_s)
    try:
        yield link
    finally:
        await link.aclose()


async def _checked_client(redis: RedisConfig, run: str) -> Any:
    client = make_client(redis, run)
    try:
        await RetryingClient(client, redis.timeout_s).call(lambda: check_server(client))
    except BaseException:
        await close_client(client)
        raise
    return client
