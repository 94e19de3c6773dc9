"""Parse `redis.url`.

    redis://[USER@]HOST[:PORT][/DB]                        one server
    unix://[USER@]/PATH/TO/SOCKET[?db=DB]                  one server of this machine
    redis+cluster://[USER@]HOST:PORT[,HOST:PORT...]        a Redis Cluster, by any of its nodes
    redis+sentinel://[USER@]HOST:PORT[,...]/SERVICE[?db=DB]  the primary that Sentinel names

rediss:// in place of redis:// means TLS. A password is never part of the URL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from async_grpo.errors import ConfigError

SERVER_PORT, SENTINEL_PORT = 6379, 26379

Kind = Literal["server", "socket", "cluster", "sentinel"]
_KINDS: dict[str, Kind] = {
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
    """Name of the service that the sentinels watch."""
    db: int

    def __str__(self) -> str:
        nodes = ", ".join(map(str, self.nodes))
        return {
            "server": nodes,
            "socket": self.path,
            "cluster": f"the cluster of {nodes}",
            "sentinel": f"{self.service} of the sentinels {nodes}",
        }[self.kind]


def parse(url: str) -> RedisUrl:
    """Parse a URL of one of the forms above. Raises ConfigError for any other."""
    parts = urlsplit(url)
    if parts.scheme not in _KINDS:
        raise _wrong(url, f"Use {'://, '.join(_KINDS)}://")
    kind = _KINDS[parts.scheme]
    username, _, hosts = parts.netloc.rpartition("@")
    default_port = SENTINEL_PORT if kind == "sentinel" else SERVER_PORT
    path = unquote(parts.path)
    address = RedisUrl(
        kind=kind,
        tls=parts.scheme.startswith("rediss"),
        nodes=() if kind == "socket" else tuple(_node(url, host, default_port) for host in hosts.split(",")),
        username=unquote(username) or None,
        path=path if kind == "socket" else "",
        service=path.strip("/") if kind == "sentinel" else "",
        db=_db(url, parts, kind),
    )
    _check(url, address)
    return address


def _check(url: str, address: RedisUrl) -> None:
    if address.kind == "socket" and not address.path:
        raise _wrong(url, "unix:// needs the path of a socket: unix:///run/redis/redis.sock")
    if address.kind == "server" and len(address.nodes) > 1:
        raise _wrong(url, "redis:// names one server. For several use redis+cluster:// or redis+sentinel://")
    if address.kind == "sentinel" and not address.service:
        raise _wrong(url, "The name of the service is missing: redis+sentinel://HOST:26379/SERVICE")
    if address.kind == "cluster" and address.db:
        raise _wrong(url, f"A cluster has database 0 alone, not {address.db}")


def _node(url: str, text: str, default_port: int) -> HostPort:
    try:
        parts = urlsplit(f"//{text}")
        if not parts.hostname:
            raise ValueError("a host is missing")
        return HostPort(parts.hostname, default_port if parts.port is None else parts.port)
    except ValueError as error:
        raise _wrong(url, f"{error}. Write HOST:PORT") from None


def _db(url: str, parts: SplitResult, kind: Kind) -> int:
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    path = parts.path.strip("/") if kind in ("server", "cluster") else ""
    text = options.pop("db", path) or "0"
    if options:
        why = f"It has the option {next(iter(options))}, but db is the only one"
        raise _wrong(url, f"{why}. Certificates: redis.tls_ca, redis.tls_cert, redis.tls_key")
    if not text.isdecimal():
        raise _wrong(url, f"The database is {text!r}, and must be a number")
    return int(text)


def _wrong(url: str, why: str) -> ConfigError:
    return ConfigError(f"redis.url is {url!r}, which is not a server's address. {why}")
