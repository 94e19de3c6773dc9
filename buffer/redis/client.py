"""The client of the configured server, and the check that the server does not lose a run."""

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
    DiscoveredConnection,
    DiscoveredTlsConnection,
    NodeDiscovery,
    SentinelDiscovery,
)
from buffer.redis.errors import PASSWORD_VARIABLE, SENTINEL_PASSWORD_VARIABLE, USERNAME_VARIABLE
from buffer.redis.scripts import RunKeys
from buffer.redis.url import RedisUrl, parse_redis_url

OLDEST_SERVER = (7, 0)
SAFE_POLICY = "noeviction"
READ_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 5.0
KEEPALIVE_IDLE_S = 15
"""Seconds until an idle connection is probed, which also keeps a NAT entry alive."""
KEEPALIVE_EVERY_S = 5
"""Seconds between two probes."""
KEEPALIVE_PROBES = 3
"""Number of unanswered probes that close a connection. Data unacknowledged for the same total time close it as well."""
MAX_CONNECTIONS = 1000
"""Limit of one client. `RetryingClient` stays far below it."""
log = structlog.get_logger()

_WRONG_MODES = {
    "cluster": "a node of a cluster: use redis+cluster://",
    "sentinel": "a sentinel: use redis+sentinel://",
}


class RunClient(Redis):
    """redis-py's client with the settings that `RetryingClient` needs."""

    address: RedisUrl
    discovery: NodeDiscovery | None = None
    """Set if the node that serves the run may change."""
    durable = True
    """True if a server without an append-only file is refused."""
    replicas_to_wait_for = 0
    barrier_key = ""
    """Key that is written before waiting for replicas."""

    @property
    def endpoint(self) -> str:
        """Description of the address for messages, without a password."""
        return str(self.discovery or self.address)


def make_client(redis: RedisConfig, run: str = "") -> RunClient:
    """Return a client that connects when first used, in a cluster to the node of `run`.

    It does not retry commands: only `RetryingClient` knows which commands may be repeated. Raises ConfigError for a
    missing or invalid URL and for unusable files of `redis.tls_*`, DependencyError for an untested version of redis-py.
    """
    check_private_names("buffer")
    if redis.url is None:
        raise ConfigError(
            "redis.url is not set and no embedded server was started: there is nothing to connect to. "
            "Pass -o redis.url=redis://HOST:6379"
        )
    address = parse_redis_url(redis.url)
    options = _connection_options(redis, address)
    discovery = _make_discovery(redis, address, run, options)
    pool = ConnectionPool(
        connection_class=_connection_class(address),
        max_connections=MAX_CONNECTIONS,
        **options,
        **_credentials(address),
        **_target_options(address, discovery),
    )
    client = cast(RunClient, RunClient.from_pool(pool))  # `from_pool`: closing the client also closes the pool
    client.address = address
    client.discovery = discovery
    client.durable = redis.durable
    client.replicas_to_wait_for = redis.replicas_to_wait_for
    client.barrier_key = RunKeys(run).key("barrier")
    return client


async def check_server(client: RunClient) -> None:
    """Raise ServerRefused for a server on which a run is not safe.

    It is refused if it is older than Redis 7.0, may evict data, has no append-only file (only a warning if
    redis.durable is false), or is a cluster node or a sentinel and its URL is that of a single server.
    """
    info = await client.info("server")
    version = str(info.get("valkey_version") or info["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_SERVER:
        raise ServerRefused(
            f"the server at {client.endpoint} is version {version}, older than 7.0: it does not know script "
            "flags, so once its memory is full it could not be drained. Use Redis >= 7.0 or Valkey"
        )
    mode = str(info.get("server_mode") or info.get("redis_mode"))
    if mode in _WRONG_MODES and client.discovery is None:
        raise ServerRefused(f"the server at {client.endpoint} is {_WRONG_MODES[mode]}")
    policy = await _eviction_policy(client)
    if policy != SAFE_POLICY:
        raise ServerRefused(
            f"the server at {client.endpoint} has maxmemory-policy {policy}, but it must be {SAFE_POLICY}: when "
            f"memory is short it would drop finished groups. Run CONFIG SET maxmemory-policy {SAFE_POLICY} on it"
        )
    await _check_durability(client)


async def _check_durability(client: RunClient) -> None:
    info = await client.info("persistence")
    if info.get("loading"):
        # Until the file is loaded, `aof_enabled` is 0 on every server. `RetryingClient` retries after this error.
        raise BusyLoadingError("it is loading its file, and does not report before that whether it keeps one")
    if info.get("aof_enabled"):
        return
    if client.durable:
        raise ServerRefused(
            f"the server at {client.endpoint} has appendonly no, but it must keep an append-only file: its death "
            "would lose the run. Run CONFIG SET appendonly yes on it, or, if it may be lost, set redis.durable: false"
        )
    _warn_about_durability(client.endpoint)


@functools.cache
def _warn_about_durability(server: str) -> None:
    """Warn once per process and server."""
    log.warning("the server keeps no append-only file: its death loses the run (redis.durable: false)", server=server)


async def _eviction_policy(client: Redis) -> str:
    """Return the eviction policy from CONFIG GET, or from INFO if an ACL forbids that."""
    try:
        policy = (await client.config_get("maxmemory-policy")).get("maxmemory-policy")
    except ResponseError:
        policy = None
    if not policy:
        policy = (await client.info("memory")).get("maxmemory_policy")
    return str(policy)


def _connection_options(redis: RedisConfig, address: RedisUrl) -> dict[str, Any]:
    """Return the options of every connection, to a server or to a seed."""
    options: dict[str, Any] = {
        "retry": Retry(NoBackoff(), 0),
        # No timeout in the socket layer: redis-py would send within asyncio.wait_for, which on Python 3.11 can
        # swallow a cancellation (CPython issue 86296), and the cancelled task would continue. `RetryingClient` has
        # its own timeouts.
        "socket_timeout": None,
        "socket_connect_timeout": min(redis.timeout_s, CONNECT_TIMEOUT_S),
        "socket_read_size": READ_BYTES,
        "protocol": 2,
    }
    if address.kind != "socket":
        options |= {"socket_keepalive": True, "socket_keepalive_options": _keepalive_options()}
    if address.tls:
        _check_certificates(redis)
        options |= {"ssl_ca_certs": redis.tls_ca, "ssl_certfile": redis.tls_cert, "ssl_keyfile": redis.tls_key}
    return options


def _keepalive_options() -> dict[int, int]:
    """Return the keepalive options of a TCP socket that this system supports."""
    silence_ms = 1000 * (KEEPALIVE_IDLE_S + KEEPALIVE_PROBES * KEEPALIVE_EVERY_S)
    values = {
        "TCP_KEEPIDLE": KEEPALIVE_IDLE_S,
        "TCP_KEEPINTVL": KEEPALIVE_EVERY_S,
        "TCP_KEEPCNT": KEEPALIVE_PROBES,
        "TCP_USER_TIMEOUT": silence_ms,
    }
    return {getattr(socket, name): value for name, value in values.items() if hasattr(socket, name)}


def _credentials(address: RedisUrl) -> dict[str, Any]:
    """Return user and password; each may be None."""
    password = os.environ.get(PASSWORD_VARIABLE) or None
    username = address.username
    if not username and password:  # without a password, the user of the environment is ignored
        username = os.environ.get(USERNAME_VARIABLE)
    return {"username": username, "password": password}


def _connection_class(address: RedisUrl) -> type[Any]:
    if address.kind == "socket":
        return UnixDomainSocketConnection
    if address.kind == "server":
        return SSLConnection if address.tls else Connection
    return DiscoveredTlsConnection if address.tls else DiscoveredConnection


def _target_options(address: RedisUrl, discovery: NodeDiscovery | None) -> dict[str, Any]:
    if discovery is not None:
        return {"discovery": discovery, "db": address.db}
    if address.kind == "socket":
        return {"path": address.path, "db": address.db}
    server = address.nodes[0]
    return {"host": server.host, "port": server.port, "db": address.db}


def _make_discovery(redis: RedisConfig, address: RedisUrl, run: str, options: dict[str, Any]) -> NodeDiscovery | None:
    # If all seeds hang, a call must still have time left to report them.
    seed_timeout_s = min(CONNECT_TIMEOUT_S, redis.timeout_s / (1 + len(address.nodes)))
    if address.kind == "cluster":
        return ClusterDiscovery(address, RunKeys(run).key(""), options | _credentials(address), seed_timeout_s)
    if address.kind == "sentinel":
        password = os.environ.get(SENTINEL_PASSWORD_VARIABLE) or None
        return SentinelDiscovery(address, options | {"password": password}, seed_timeout_s)
    return None


def _check_certificates(redis: RedisConfig) -> None:
    """Check the files now, so that the error names the setting. redis-py reads them at the first connection only."""
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
