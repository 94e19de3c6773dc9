"""uvicorn in a process that also does other work, with its own signal handlers, log and listening socket.

    connection --headers, within HEADERS_S--> RequestLimit --> application

Health and metrics are always answered, however many connections wait and however many requests are being handled.
Beyond MAX_CONNECTIONS the connection that has waited longest for its next request is closed; if none waits, the one
with the oldest request.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from async_grpo.utils.addresses import is_loopback

KEEP_ALIVE_S = 15
HEADERS_S = 10
"""Seconds within which a client must send the headers of a request, from the connection or from their first byte."""
CLOSE_S = 2
"""Seconds for pending responses when the server stops."""
MAX_CONNECTIONS = 320
"""Maximum number of open connections. It exceeds all request limits, so that no active request loses its connection."""
ALWAYS_ANSWERED = frozenset({"/healthz", "/readyz", "/metrics"})


class HttpServer:
    """An HTTP server: run `serve` in a task; `stop` ends it.

    Beyond `most_requests` concurrent requests, further ones get a 503, except those for health and metrics.
    """

    def __init__(self, app: ASGIApp, most_requests: int) -> None:
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                RequestLimit(app, most_requests),
                http=DeadlineProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSE_S,
            )
        )

    async def serve(self, listener: socket.socket) -> None:
        """Answer requests until `stop`, then close the socket."""
        await self._uvicorn.serve([listener])

    def stop(self) -> None:
        """Make `serve` return. Any thread may call this."""
        self._uvicorn.should_exit = True


class RequestLimit:
    """Answers 503 while `most` requests are being handled."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["path"] in ALWAYS_ANSWERED:
            await self._app(scope, receive, send)
            return
        if self._under_way >= self._most:
            busy = PlainTextResponse("Service Unavailable", 503, headers={"connection": "close"})
            await busy(scope, receive, send)
            return
        self._under_way += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._under_way -= 1


class LocalNamesOnly:
    """Refuses requests for host names other than this machine's.

    Otherwise a web page whose name resolves to the loopback would have the same origin (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, refusal: ASGIApp | None = None) -> None:
        self._app = app
        self._refusal = refusal or PlainTextResponse("this server answers to localhost only\n", 403)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http" and not is_local_name(dict(scope["headers"]).get(b"host", b"").decode("latin-1")):
            await self._refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def is_local_name(host: str) -> bool:
    """True if a Host header names the loopback."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return is_loopback(name)


class DeadlineProtocol(H11Protocol):
    """uvicorn's connection, with a limit of HEADERS_S on waiting for headers.

    Between requests, until the first byte, uvicorn's keep-alive timer applies.
    """

    deadline: asyncio.TimerHandle | None = None
    waits_since_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()
        if len(self.connections) > MAX_CONNECTIONS:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.waits:
            self._headers_came()
        elif self.deadline is None:
            self._expect_headers()

    def on_response_complete(self) -> None:
        self.waits_since_s = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_came()
        super().connection_lost(exc)

    @property
    def waits(self) -> bool:
        """True if the connection waits for a request."""
        return self.cycle is None or self.cycle.response_complete

    def _expect_headers(self) -> None:
        self.waits_since_s = self.loop.time()
        self.deadline = self.loop.call_later(HEADERS_S, self.timeout_keep_alive_handler)

    def _headers_came(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def _make_room(self) -> None:
        others = [other for other in self.connections if isinstance(other, DeadlineProtocol) and other is not self]
        staying = [other for other in others if not other.transport.is_closing()]
        min(staying, key=lambda other: (not other.waits, other.waits_since_s)).transport.abort()


class _Uvicorn(uvicorn.Server):
    """Does not install signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at `host` and `port` (0: any free port). Raises OSError if it cannot.

    Both bind and listen are called here, because two sockets may be bound to one port as long as neither listens.
    """
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


def address_of(host: str, port: int) -> str:
    """Return the URL of a socket at `host` and `port`; for all addresses, with this machine's name."""
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        return f"http://{socket.gethostname()}:{port}"
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"
