"""Parse `redis.url`.

    redis://[USER@]HOST[:PORT][/DB]                        one server
    unix://[USER@]/PATH/TO/SOCKET[?db=DB]                  one server on this machine
    redis+cluster://[USER@]HOST:PORT[,HOST:PORT...]        a Redis Cluster, by any of its nodes
    redis+sentinel://[USER@]HOST:PORT[,...]/SERVICE[?db=DB]  the primary of a service, found through Sentinel

rediss:// instead of redis:// means TLS. A password is never part of the URL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from async_grpo.errors import ConfigError

SERVER_PORT = 6379
SENTINEL_PORT = 26379

Kind = Literal["server", "socket", "cluster", "sentinel"]
_KIND_BY_SCHEME: dict[str, Kind] = {
    "redis": "server",
    "rediss": "server",
    "unix": "socket",
    "redis+cluster": "cluster",
    "rediss+cluster": "cluster",
    "redis+sentinel": "sentinel",
    "rediss+sentinel": "sentinel",
}


class HostPort(NamedTuple):
    """A TCP address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A parsed `redis.url`."""

    kind: Kind
    tls: bool
    nodes: Sequence[HostPort]
    """The server, the seeds of the cluster, or the sentinels. Empty for a socket."""
    username: str | None
    path: str
    """Path of the socket."""
    service: str
    """Name of the service in the configuration of the sentinels."""
    db: int

    def __str__(self) -> str:
        nodes = ", ".join(map(str, self.nodes))
        return {
            "server": nodes,
            "socket": self.path,
            "cluster": f"the cluster of {nodes}",
            "sentinel": f"{self.service} of the sentinels {nodes}",
        }[self.kind]


def parse_redis_url(url: str) -> RedisUrl:
    """Parse a URL of one of the forms above. Raises ConfigError for other URLs."""
    parts = urlsplit(url)
    if parts.scheme not in _KIND_BY_SCHEME:
        raise _invalid_url_error(url, f"Use {'://, '.join(_KIND_BY_SCHEME)}://")

    kind = _KIND_BY_SCHEME[parts.scheme]
    username, _, hosts = parts.netloc.rpartition("@")
    nodes: list[HostPort] = []
    if kind != "socket":
        default_port = SENTINEL_PORT if kind == "sentinel" else SERVER_PORT
        nodes = [_parse_node(url, host, default_port) for host in hosts.split(",")]
    path = unquote(parts.path)
    address = RedisUrl(
        kind=kind,
        tls=parts.scheme.startswith("rediss"),
        nodes=tuple(nodes),
        username=unquote(username) or None,
        path=path if kind == "socket" else "",
        service=path.strip("/") if kind == "sentinel" else "",
        db=_parse_database(url, parts, kind),
    )
    _check_address(url, address)
    return address


def _check_address(url: str, address: RedisUrl) -> None:
    if address.kind == "socket" and not address.path:
        raise _invalid_url_error(url, "unix:// needs the path of a socket: unix:///run/redis/redis.sock")
    if address.kind == "server" and len(address.nodes) > 1:
        raise _invalid_url_error(
            url, "redis:// takes one server. For several use redis+cluster:// or redis+sentinel://"
        )
    if address.kind == "sentinel" and not address.service:
        raise _invalid_url_error(url, "The name of the service is missing: redis+sentinel://HOST:26379/SERVICE")
    if address.kind == "cluster" and address.db:
        raise _invalid_url_error(url, f"A cluster has only database 0, not {address.db}")


def _parse_node(url: str, text: str, default_port: int) -> HostPort:
    try:
        parts = urlsplit(f"//{text}")
        if not parts.hostname:
            raise ValueError("a host is missing")
        return HostPort(parts.hostname, default_port if parts.port is None else parts.port)
    except ValueError as error:
        raise _invalid_url_error(url, f"{error}. Write HOST:PORT") from None


def _parse_database(url: str, parts: SplitResult, kind: Kind) -> int:
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    path = parts.path.strip("/") if kind in ("server", "cluster") else ""
    text = options.pop("db", path) or "0"
    if options:
        problem = f"It has the option {next(iter(options))}, but db is the only one"
        raise _invalid_url_error(url, f"{problem}. Certificates: redis.tls_ca, redis.tls_cert, redis.tls_key")
    if not text.isdecimal():
        raise _invalid_url_error(url, f"The database is {text!r}, and must be a number")
    return int(text)


def _invalid_url_error(url: str, fix: str) -> ConfigError:
    return ConfigError(f"redis.url is {url!r}, which is not a server's address. {fix}")
