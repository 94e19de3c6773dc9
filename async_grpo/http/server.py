"""uvicorn as a part of a process that has other things to do: it leaves the signals and the log to its host."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

KEEP_ALIVE_S = 15
CLOSE_S = 2
"""What answers under way get when the socket is closed."""


class HttpServer:
    """`serve` in a task of some event loop, until `stop`.

    From the `most_connections`-th connection at once on, a request gets a 503.
    """

    def __init__(self, app: ASGIApp, most_connections: int) -> None:
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=most_connections,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSE_S,
            )
        )

    async def serve(self, listener: socket.socket) -> None:
        """Answer until `stop`; the socket is closed at the end."""
        await self._uvicorn.serve([listener])

    def stop(self) -> None:
        """Begin to end; any thread may call it."""
        self._uvicorn.should_exit = True


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
