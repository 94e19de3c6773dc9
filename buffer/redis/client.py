"""A checked connection to Redis or Valkey."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import AuthenticationError, ConnectionError, ResponseError, TimeoutError

from async_grpo.config.schema import RedisConfig
from async_grpo.errors import ConfigError, ServerLost, ServerRefused

PASSWORD_VARIABLE = "ASYNC_GRPO_REDIS_PASSWORD"
OLDEST_VERSION = (7, 0)
_READ_BYTES = 1 << 20
_LONGEST_PAUSE_S = 1.0


def make_client(config: RedisConfig, *, blocking_s: float = 0.0) -> Redis:
    """A client whose calls end within config.timeout_s (plus `blocking_s` for BLPOP).

    Calls are repeated when the connection breaks: every transition is idempotent, so a repetition
    changes nothing twice. The password comes from the environment only.
    """
    if config.url is None:
        raise ConfigError(
            "redis.url is not set and no embedded server was started. Pass -o redis.url=redis://HOST:6379"
        )
    attempts = max(1, int(config.timeout_s / _LONGEST_PAUSE_S))
    return Redis.from_url(
        config.url,
        password=os.environ.get(PASSWORD_VARIABLE),
        socket_timeout=config.timeout_s + blocking_s,
        socket_connect_timeout=config.timeout_s,
        socket_read_size=_READ_BYTES,
        retry=Retry(ExponentialBackoff(cap=_LONGEST_PAUSE_S, base=0.05), attempts),
        retry_on_error=[ConnectionError],
    )


def where(url: str | None) -> str:
    """The server's address without its credentials, for messages."""
    parts = urlsplit(url or "")
    return f"{parts.scheme}://{parts.path if parts.scheme == 'unix' else parts.netloc.rpartition('@')[2]}"


async def check_server(client: Redis, address: str) -> None:
    """Refuse a server that cannot hold a run. Raises ServerRefused, ServerLost."""
    try:
        about: dict[str, Any] = await client.info("server")
        policy = await _eviction_policy(client)
    except AuthenticationError:
        raise ServerRefused(f"{address} wants a password. Set the environment variable {PASSWORD_VARIABLE}") from None
    except (ConnectionError, TimeoutError, OSError) as error:
        raise ServerLost(f"no server answers at {address}: {error}. Is it running, and is redis.url right?") from error
    version = tuple(int(part) for part in str(about["redis_version"]).split(".")[:2])
    if version < OLDEST_VERSION:
        raise ServerRefused(
            f"the server at {address} is version {about['redis_version']}, older than 7.0: its scripts cannot run when "
            "memory is full, so a full buffer could not drain. Use Redis >= 7.0 or Valkey"
        )
    if policy != "noeviction":
        raise ServerRefused(
            f"the server at {address} has maxmemory-policy {policy}: it may drop groups when memory is full. "
            "Set it to noeviction (CONFIG SET maxmemory-policy noeviction)"
        )


async def _eviction_policy(client: Redis) -> str:
    """From CONFIG where that is allowed, else from INFO."""
    try:
        found = await client.config_get("maxmemory-policy")
    except ResponseError:
        found = {"maxmemory-policy": (await client.info("memory")).get("maxmemory_policy", "unknown")}
    return str(found.get("maxmemory-policy", "unknown"))
