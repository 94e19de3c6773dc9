"""The socket of a rollout server: open before the engine starts, closed after it has ended.

It waits for connections, and takes turns with everything else in the server's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator

import structlog
import uvicorn

from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError
from rollout_server.cast import Cast
from rollout_server.dispatcher import Dispatcher
from rollout_server.evaluator import Evaluator
from rollout_server.http.app import make_app
from rollout_server.http.keys import Keys
from rollout_server.http.lobby import LEAVING, Backstage, Lobby
from rollout_server.http.prompts import Prompts
from rollout_server.http.writers import Writers
from rollout_server.weight_watcher import WeightWatcher

MAX_CONNECTIONS = 256
PORTS_TRIED = 64
"""From rollout.http.port on: as many servers may share a machine."""
KEEP_ALIVE_S = 15
CLOSE_S = 2
"""What answers under way get when the socket is closed."""

log = structlog.get_logger()


class HttpFront:
    """`open`, then `attach` once there is something to serve, `detach` before that goes, `aclose`."""

    def __init__(self, config: RunConfig, name: str, prompts: Prompts) -> None:
        """Raises ConfigError if the configuration would let anybody in."""
        self._config = config.rollout.http
        self._lobby = Lobby(config, name, Keys.of(os.environ, self._config), prompts)
        self._listening: asyncio.Task[None] | None = None
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                make_app(self._lobby),
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=MAX_CONNECTIONS,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSE_S,
            )
        )
        self.address = ""
        """`http://host:port`, once it is open."""

    async def open(self) -> None:
        """Listen. Raises ConfigError if there is no free port, or no such host."""
        assert self._config.port is not None
        listener = bind(self._config.host, self._config.port)
        self.address = address_of(*listener.getsockname()[:2])
        self._listening = asyncio.create_task(self._uvicorn.serve([listener]), name="http")
        log.info("http", address=self.address)

    async def run(self) -> None:
        """Until cancelled; raises what ended the listening."""
        assert self._listening is not None
        await asyncio.shield(self._listening)

    def attach(self, cast: Cast, watcher: WeightWatcher, dispatcher: Dispatcher, evaluator: Evaluator) -> None:
        """The engine has its first weights: the server is ready."""
        writers = Writers(cast.engine, self._config.max_concurrency)
        self._lobby.backstage = Backstage(cast, watcher, dispatcher, evaluator, writers)

    async def finish(self, timeout_s: float) -> None:
        """Of a server that drains: wait for completions under way, then end them."""
        if self._lobby.backstage is not None:
            await self._lobby.backstage.writers.finish(timeout_s)

    async def detach(self) -> None:
        """The engine is about to go: end completions under way."""
        if (backstage := self._lobby.backstage) is not None:
            self._lobby.backstage, self._lobby.missing = None, LEAVING
            await backstage.writers.close()

    async def aclose(self) -> None:
        """Close the socket and all connections."""
        if self._listening is not None:
            self._uvicorn.should_exit = True
            await self._listening


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the server."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on the port, or on the next free one above it (0: any). Raises ConfigError."""
    last: OSError | None = None
    for candidate in range(port, min(port + PORTS_TRIED, 65536)) if port else [0]:
        try:
            return _listen(host, candidate)
        except OSError as error:
            last = error
    raise ConfigError(
        f"rollout.http: cannot listen on {host!r}, port {port} and the {PORTS_TRIED - 1} above it: {last}. "
        "Set rollout.http.host to an address of this machine, and rollout.http.port to a free one, to 0 (any), or "
        "to -1 (off)"
    ) from last


def address_of(host: str, port: int) -> str:
    """Where others find what listens there; a socket on all addresses is found by the machine's name."""
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        return f"http://{socket.gethostname()}:{port}"
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"


def _listen(host: str, port: int) -> socket.socket:
    """Two sockets may be bound to one port as long as neither listens, so both are tried here."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
