"""A client of the configured server, and the check that this server can hold a run safely."""

from __future__ import annotations

import os
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError

from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import ConfigError, ServerRefused

PASSWORD_VARIABLE = "ASYNC_GRPO_REDIS_PASSWORD"
OLDEST_SERVER = (7, 0)
SAFE_POLICY = "noeviction"
READ_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 5.0


def make_client(redis: RedisConfig) -> Redis:
    """A client that connects when first used. It never repeats a command by itself: `Link` does, and
    knows which may be repeated. Raises ConfigError for a URL that is missing or no server's."""
    if redis.url is None:
        raise ConfigError(
            "redis.url is not set and no embedded server was started: there is nothing to connect to. "
            "Pass -o redis.url=redis://HOST:6379"
        )
    options: dict[str, Any] = {
        "retry": Retry(NoBackoff(), 0),
        # No timeout in the socket layer: redis-py would send under asyncio.wait_for, which on Python 3.11 can
        # swallow a cancellation (CPython issue 86296), and the cancelled task would go on. `Link` has a clock.
        "socket_timeout": None,
        "socket_connect_timeout": min(redis.timeout_s, CONNECT_TIMEOUT_S),
        "socket_read_size": READ_BYTES,
        "protocol": 2,
    }
    if password := os.environ.get(PASSWORD_VARIABLE):
        options["password"] = password
    try:
        return Redis.from_url(redis.url, **options)
    except ValueError as error:
        raise ConfigError(f"redis.url is not a server's address: {error}. Use redis://, rediss:// or unix://") from None


def address(client: Redis) -> str:
    """Where a client connects to, without its password."""
    target = client.connection_pool.connection_kwargs
    return str(target.get("path") or f"{target.get('host', 'localhost')}:{target.get('port', 6379)}")


async def check_server(client: Redis) -> None:
    """Raises ServerRefused for a server older than Redis 7.0, or one that may evict data."""
    about = await client.info("server")
    version = str(about.get("valkey_version") or about["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_SERVER:
        raise ServerRefused(
            f"the server at {address(client)} is version {version}, older than 7.0: it does not know script flags, so "
            "once its memory is full it could not be drained. Use Redis >= 7.0 or Valkey"
        )
    policy = await _eviction_policy(client)
    if policy != SAFE_POLICY:
        raise ServerRefused(
            f"the server at {address(client)} has maxmemory-policy {policy}, but it must be {SAFE_POLICY}: when memory "
            f"is short it would drop finished groups. Run CONFIG SET maxmemory-policy {SAFE_POLICY} on it"
        )


async def _eviction_policy(client: Redis) -> str:
    """From CONFIG GET, or from INFO where an ACL forbids it."""
    try:
        found = await client.config_get("maxmemory-policy")
    except ResponseError:
        found = {}
    return str(found.get("maxmemory-policy") or (await client.info("memory")).get("maxmemory_policy"))
