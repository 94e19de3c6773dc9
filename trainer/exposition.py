"""/metrics, /healthz and /readyz of the trainer: one thread beside the training, on rank 0.

    Diary --Progress--> Exposition (thread, uvicorn) <--GET-- Prometheus, health checks
                            |
                            +--stats, at most once a second--> buffer, over a connection of its own

The training never waits for it: a step replaces one reference. Where it cannot listen or dies, the log says so and the
training goes on.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Mapping
from typing import Any

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from async_grpo.config import RunConfig
from async_grpo.http import HttpServer, address_of, listen
from buffer import BufferStats, RecentStats, RedisBuffer, attach
from trainer.gauges import Progress, TrainerCollector

MAX_REQUESTS = 64
CLOSE_S = 5.0

log = structlog.get_logger()


class Exposition:
    """`open`, then `joined`, `serving` and `step` as the training goes on, then `close`. No call raises or waits for a
    client."""

    def __init__(self, config: RunConfig) -> None:
        self._http = config.telemetry.http
        self._pages = _Pages(config)
        self._server = HttpServer(self._pages.app(), MAX_REQUESTS)
        self._thread: threading.Thread | None = None

    def open(self) -> str:
        """Listen; returns the address, "" if nobody listens."""
        host, port = self._http.host, self._http.port
        if not self._http.is_on or port is None:
            return ""
        try:
            listener = listen(host, port)
        except OSError as error:
            log.warning(f"telemetry.http: cannot listen on {host!r}, port {port}: no metrics. {error}")
            return ""
        address = address_of(*listener.getsockname()[:2])
        self._thread = threading.Thread(target=self._run, args=(listener,), name="metrics", daemon=True)
        self._thread.start()
        return address

    def joined(self, epoch: int, version: int) -> None:
        """This trainer has taken over the run, at `version`: from now on there is one to ask the buffer about."""
        self._pages.progress = self._pages.progress.joined(epoch, version)

    def serving(self) -> None:
        """Rollout servers can fetch the weights of this trainer's version: it is ready."""
        self._pages.progress = self._pages.progress.serving()

    def step(self, row: Mapping[str, Any]) -> None:
        """A finished step."""
        self._pages.progress = self._pages.progress.after(row)

    def close(self) -> None:
        """Stop listening; a thread that does not end by then ends with the process."""
        if self._thread is not None:
            self._server.stop()
            self._thread.join(CLOSE_S)

    def _run(self, listener: socket.socket) -> None:
        try:
            asyncio.run(self._serve(listener))
        except Exception:  # no fault of a page of figures may end a training
            log.exception("/metrics is gone")
        finally:
            listener.close()

    async def _serve(self, listener: socket.socket) -> None:
        try:
            await self._server.serve(listener)
        finally:
            await self._pages.aclose()


class _Pages:
    """What is answered. `progress` is set by the training's thread and read by that of the pages."""

    def __init__(self, config: RunConfig) -> None:
        self.progress = Progress()
        self._config = config
        self._collector = TrainerCollector(config)
        self._registry = CollectorRegistry()
        self._registry.register(self._collector)
        ProcessCollector(registry=self._registry)
        self._buffer: RedisBuffer | None = None
        self._recent = RecentStats()

    def app(self) -> Starlette:
        """The routes; they need no key and tell no text."""
        pages = {"/healthz": self._healthz, "/readyz": self._readyz, "/metrics": self._metrics}
        return Starlette(routes=[Route(path, page, methods=["GET"]) for path, page in pages.items()])

    async def aclose(self) -> None:
        """Close the connection to the buffer."""
        if self._buffer is not None:
            await self._buffer.aclose()

    async def _healthz(self, _request: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def _readyz(self, _request: Request) -> Response:
        if self.progress.ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": "no weights are served yet"}, 503)

    async def _metrics(self, _request: Request) -> Response:
        progress = self.progress
        if progress.epoch > 0:
            await self._recent.refresh(self._ask)
        self._collector.progress, self._collector.stats = progress, self._recent.stats
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def _ask(self) -> BufferStats:
        if self._buffer is None:
            self._buffer = attach(self._config.redis, self._config.name)
        return await self._buffer.stats()
