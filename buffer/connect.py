"""Connect to the buffer and the board of a configured run, on a server that was checked."""

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
from buffer.redis.retrying import RetryingClient, close
from buffer.redis.scripts import RunKeys

_LOOK_AT_ONCE = 1000


async def connect(
    redis: RedisConfig,
    run: str,
    *,
    policy: ReplayPolicy,
    lease_s: float,
    max_attempts: int,
    quota: MemoryQuota = NO_QUOTA,
) -> RedisBuffer:
    """Open the buffer of `run`, new or as it was left. Raises ServerLost, ServerRefused."""
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
        await close(client)
        raise


def attach(redis: RedisConfig, run: str) -> RedisBuffer:
    """The buffer of a run that another process has opened, for reading. It checks and writes nothing, and connects when
    first used."""
    return RedisBuffer(RetryingClient(make_client(redis, run), redis.timeout_s), run)


def attach_board(redis: RedisConfig, run: str) -> RedisBoard:
    """The board of a run, for reading. It checks nothing, and connects when first used."""
    return RedisBoard(make_client(redis, run), run, timeout_s=redis.timeout_s)


async def connect_board(redis: RedisConfig, run: str) -> RedisBoard:
    """The board of `run`. Raises ServerLost, ServerRefused."""
    return RedisBoard(await _checked_client(redis, run), run, timeout_s=redis.timeout_s)


async def check_memory(config: RunConfig) -> None:
    """Raises ConfigError if the server has too little memory for this run beside the other runs on it. A run that has
    reserved its share already is not asked again."""
    plan, run = plan_buffer_memory(config), config.name
    async with _checked_link(config.redis, run) as link:
        about = await link.call(lambda: link.client.info("memory"))
        known = await link.call(lambda: link.client.hget(RunKeys(run).of("meta"), "reserved_bytes"))
        others = {} if int(known or 0) >= plan.quota.reserved_bytes else await _reserved_by_others(link, run)
    plan.check(int(about.get("maxmemory") or about.get("total_system_memory") or 0), "the server at redis.url", others)


async def _reserved_by_others(link: RetryingClient, run: str) -> dict[str, int]:
    """Run -> bytes, of the runs that this user may see: what they reserve, or what is left of those that have ended."""
    fields, found = ["reserved_bytes", "stored_bytes", "ended"], {}
    try:
        async for names in _keys(link, RunKeys("*").of("meta")):
            for name in names:
                reserved, stored, ended = await link.call(partial(link.client.hmget, name, fields))
                found[RunKeys.run_of(name.decode())] = int((stored if ended == b"1" else reserved) or 0)
    except ServerRefused:  # a user that may see nothing but its own run
        return {}
    return {other: size for other, size in found.items() if other != run and size}


async def knows_run(redis: RedisConfig, run: str) -> bool:
    """Whether the server holds anything of `run`. It changes nothing."""
    async with _checked_link(redis, run) as link:
        return bool(await link.call(lambda: link.client.exists(RunKeys(run).of("meta"))))


async def wipe_run(redis: RedisConfig, run: str) -> int:
    """Delete everything that `run` has on the configured server; returns the number of deleted keys."""
    async with _checked_link(redis, run) as link:
        return await wipe(link.client, run, timeout_s=redis.timeout_s)


async def wipe(client: Any, run: str, *, timeout_s: float = 30.0) -> int:
    """Delete every key of `run`; returns how many there were. `timeout_s` bounds the work on one page of keys.

    It repeats until a pass finds nothing, because a failover during a pass may hide keys from it.
    """
    link, deleted = RetryingClient(client, timeout_s), 0
    while found := await _wipe_once(link, run):
        deleted += found
    return deleted


async def _wipe_once(link: RetryingClient, run: str) -> int:
    deleted = 0
    async for names in _keys(link, RunKeys(run).pattern):
        deleted += await link.call(partial(link.client.unlink, *names))
    return deleted


async def _keys(link: RetryingClient, pattern: str) -> AsyncIterator[list[bytes]]:
    """The keys of the server that match, a page at a time; one may come twice."""
    cursor: int | None = None
    while cursor != 0:
        cursor, names = await link.call(partial(link.client.scan, cursor or 0, match=pattern, count=_LOOK_AT_ONCE))
        if names:
            yield names


async def open_run(config: RunConfig) -> RedisBuffer:
    """Open the buffer of the run, new or as it was left. Raises ServerLost, ServerRefused, and ConfigError if the
    server has too little memory for the run."""
    await check_memory(config)
    return await connect(
        config.redis,
        config.name,
        policy=config.replay_policy,
        lease_s=config.lease_s,
        max_attempts=config.rollout.max_attempts,
        quota=plan_buffer_memory(config).quota,
    )


async def is_over(config: RunConfig, buffer: ReplayBuffer, board: RunBoard) -> bool:
    """Whether rollout servers have nothing left to do: every step is trained and the final policy is evaluated (its
    probe comes before that). The trainer may still have to read both, and to export."""
    evaluated = any(evaluation.version >= config.steps for evaluation in await board.evaluations())
    return evaluated and (await buffer.stats()).ended


@asynccontextmanager
async def _checked_link(redis: RedisConfig, run: str) -> AsyncIterator[RetryingClient]:
    """A connection for a few questions to a checked server."""
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
        await close(client)
        raise
    return client
