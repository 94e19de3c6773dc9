"""The client of the configured server, and the check that the server can hold a run safely."""

from __future__ import annotations

import functools
import os
import socket
import ssl
from typing import Any, cast

import structlog
from redis.asyncio import Redis
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, ResponseError

from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import ConfigError, ServerRefused
from async_grpo.utils.private_names import check_private_names
from buffer.redis.discovery import (
    ClusterDiscovery,
    FoundConnection,
    FoundTlsConnection,
    NodeDiscovery,
    SentinelDiscovery,
)
from buffer.redis.errors import PASSWORD_VARIABLE, SENTINEL_PASSWORD_VARIABLE, USERNAME_VARIABLE
from buffer.redis.scripts import RunKeys
from buffer.redis.url import RedisUrl, parse

OLDEST_SERVER = (7, 0)
SAFE_POLICY = "noeviction"
READ_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 5.0
KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_PROBES = 15, 5, 3
"""TCP keepalive: seconds until an idle connection is probed (which also keeps a NAT entry alive), seconds between
probes, and unanswered probes that close it. Data unacknowledged for the same total time close it as well."""
MAX_CONNECTIONS = 1000
"""Limit of one client. `RetryingClient` stays far below it."""
log = structlog.get_logger()

_MODES = {"cluster": "a node of a cluster: use redis+cluster://", "sentinel": "a sentinel: use redis+sentinel://"}


class RunClient(Redis):
    """redis-py's client, with what `RetryingClient` needs to know about it."""

    address: RedisUrl
    discovery: NodeDiscovery | None = None
    """Set if the node that serves the run may change."""
    durable = True
    """Whether a server without an append-only file is refused."""
    replicas_to_wait_for = 0
    barrier_key = ""
    """Key that is written before waiting for replicas."""

    @property
    def endpoint(self) -> str:
        """The address that it connects to, in words and without its password."""
        return str(self.discovery or self.address)


def make_client(redis: RedisConfig, run: str = "") -> RunClient:
    """A client that connects when first used, in a cluster to the node of `run`.

    It never repeats a command by itself, because only `RetryingClient` knows which commands may be repeated. Raises
    ConfigError for a missing or invalid URL and for unusable files of `redis.tls_*`, DependencyError for a version of
    redis-py that was not tested.
    """
    check_private_names("buffer")
    if redis.url is None:
        raise ConfigError(
            "redis.url is not set and no embedded server was started: there is nothing to connect to. "
            "Pass -o redis.url=redis://HOST:6379"
        )
    address = parse(redis.url)
    options = _options(redis, address)
    discovery = _discovery(redis, address, run, options)
    pool = ConnectionPool(
        connection_class=_connection_class(address),
        max_connections=MAX_CONNECTIONS,
        **options,
        **_credentials(address),
        **_target(address, discovery),
    )
    client = cast(RunClient, RunClient.from_pool(pool))  # which owns the pool, and closes it
    client.address, client.discovery, client.durable = address, discovery, redis.durable
    client.replicas_to_wait_for, client.barrier_key = redis.replicas_to_wait_for, RunKeys(run).of("barrier")
    return client


async def check_server(client: RunClient) -> None:
    """Raises ServerRefused for a server that is older than Redis 7.0, may evict data, keeps no append-only file (only a
    warning if redis.durable is false), or is part of a cluster or a sentinel that its URL does not name as such."""
    about = await client.info("server")
    version = str(about.get("valkey_version") or about["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_SERVER:
        raise ServerRefused(
            f"the server at {client.endpoint} is version {version}, older than 7.0: it does not know script "
            "flags, so once its memory is full it could not be drained. Use Redis >= 7.0 or Valkey"
        )
    mode = str(about.get("server_mode") or about.get("redis_mode"))
    if mode in _MODES and client.discovery is None:
        raise ServerRefused(f"the server at {client.endpoint} is {_MODES[mode]}")
    policy = await _eviction_policy(client)
    if policy != SAFE_POLICY:
        raise ServerRefused(
            f"the server at {client.endpoint} has maxmemory-policy {policy}, but it must be {SAFE_POLICY}: when "
            f"memory is short it would drop finished groups. Run CONFIG SET maxmemory-policy {SAFE_POLICY} on it"
        )
    await _check_file(client)


async def _check_file(client: RunClient) -> None:
    about = await client.info("persistence")
    if about.get("loading"):
        raise BusyLoadingError("it is reading its file, and does not report before that whether it keeps one")
    if about.get("aof_enabled"):
        return
    if client.durable:
        raise ServerRefused(
            f"the server at {client.endpoint} has appendonly no, but it must keep an append-only file: its death "
            "would lose the run. Run CONFIG SET appendonly yes on it, or, if it may be lost, set redis.durable: false"
        )
    _warn_of_memory_alone(client.endpoint)


@functools.cache
def _warn_of_memory_alone(server: str) -> None:
    """Warn once per process and server."""
    log.warning("the server keeps no append-only file: its death loses the run (redis.durable: false)", server=server)


async def _eviction_policy(client: Redis) -> str:
    """The eviction policy from CONFIG GET, or from INFO if an ACL forbids that."""
    try:
        found = await client.config_get("maxmemory-policy")
    except ResponseError:
        found = {}
    return str(found.get("maxmemory-policy") or (await client.info("memory")).get("maxmemory_policy"))


def _options(redis: RedisConfig, address: RedisUrl) -> dict[str, Any]:
    """Options of every connection, to a server or to a seed."""
    options: dict[str, Any] = {
        "retry": Retry(NoBackoff(), 0),
        # No timeout in the socket layer: redis-py would send under asyncio.wait_for, which on Python 3.11 can
        # swallow a cancellation (CPython issue 86296), and the cancelled task would go on. `RetryingClient` has a
        # clock.
        "socket_timeout": None,
        "socket_connect_timeout": min(redis.timeout_s, CONNECT_TIMEOUT_S),
        "socket_read_size": READ_BYTES,
        "protocol": 2,
    }
    if address.kind != "socket":
        options |= {"socket_keepalive": True, "socket_keepalive_options": _keepalive()}
    if address.tls:
        _check_certificates(redis)
        options |= {"ssl_ca_certs": redis.tls_ca, "ssl_certfile": redis.tls_cert, "ssl_keyfile": redis.tls_key}
    return options


def _keepalive() -> dict[int, int]:
    """Keepalive options of a TCP socket, as far as this system has them."""
    silence_ms = 1000 * (KEEPALIVE_IDLE_S + KEEPALIVE_PROBES * KEEPALIVE_EVERY_S)
    wanted = {
        "TCP_KEEPIDLE": KEEPALIVE_IDLE_S,
        "TCP_KEEPINTVL": KEEPALIVE_EVERY_S,
        "TCP_KEEPCNT": KEEPALIVE_PROBES,
        "TCP_USER_TIMEOUT": silence_ms,
    }
    return {getattr(socket, name): value for name, value in wanted.items() if hasattr(socket, name)}


def _credentials(address: RedisUrl) -> dict[str, Any]:
    """User and password; each may be None. The user of the environment counts only together with its password."""
    password = os.environ.get(PASSWORD_VARIABLE) or None
    username = address.username or (os.environ.get(USERNAME_VARIABLE) if password else None)
    return {"username": username, "password": password}


def _connection_class(address: RedisUrl) -> type[Any]:
    if address.kind == "socket":
        return UnixDomainSocketConnection
    if address.kind == "server":
        return SSLConnection if address.tls else Connection
    return FoundTlsConnection if address.tls else FoundConnection


def _target(address: RedisUrl, discovery: NodeDiscovery | None) -> dict[str, Any]:
    if discovery is not None:
        return {"discovery": discovery, "db": address.db}
    if address.kind == "socket":
        return {"path": address.path, "db": address.db}
    return {"host": address.nodes[0].host, "port": address.nodes[0].port, "db": address.db}


def _discovery(redis: RedisConfig, address: RedisUrl, run: str, options: dict[str, Any]) -> NodeDiscovery | None:
    patience_s = min(CONNECT_TIMEOUT_S, redis.timeout_s / (1 + len(address.nodes)))
    if address.kind == "cluster":
        return ClusterDiscovery(address, RunKeys(run).of(""), options | _credentials(address), patience_s)
    if address.kind == "sentinel":
        password = os.environ.get(SENTINEL_PASSWORD_VARIABLE) or None
        return SentinelDiscovery(address, options | {"password": password}, patience_s)
    return None


def _check_certificates(redis: RedisConfig) -> None:
    """Check the files now, so that the error names the setting, rather than at the first connection."""
    context = ssl.create_default_context()
    if redis.tls_ca is not None:
        try:
            context.load_verify_locations(redis.tls_ca)
        except OSError as error:
            raise ConfigError(f"redis.tls_ca is {redis.tls_ca}, which holds no CA certificate: {error}") from None
    if redis.tls_cert is not None:
        try:
            context.load_cert_chain(redis.tls_cert, redis.tls_key)
        except OSError as error:
            raise ConfigError(
                f"redis.tls_cert ({redis.tls_cert}) and redis.tls_key ({redis.tls_key}) are not a certificate with its "
                f"key: {error}"
            ) from None
