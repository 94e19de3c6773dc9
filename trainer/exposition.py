"""/metrics, /healthz and /readyz of the trainer: one thread beside the training, on rank 0.

    Diary --Progress--> Exposition (thread) <--GET-- Prometheus, health checks
                            |
                            +--stats, at most once a second--> buffer, over a connection of its own

The training never waits for it: a step replaces one reference. It waits for requests, bounded in number, length and
time. Where it cannot listen or dies, the log says so and the training goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest

from async_grpo.config import RunConfig
from async_grpo.errors import AsyncGrpoError
from buffer import RedisBuffer, open_run
from trainer.gauges import Progress, TrainerCollector

MAX_CONNECTIONS = 16
MAX_HEAD_BYTES = 8192
REQUEST_S = 5.0
"""From the first byte of a request to the last of its answer."""
STATS_MAX_AGE_S = 1.0
STATS_TIMEOUT_S = 2.0
CLOSE_S = 2.0
PLAIN = "text/plain; charset=utf-8"

log = structlog.get_logger()


class Exposition:
    """`open`, then `serving` and `step` as the training goes on, then `close`. No call raises or waits for a client."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._progress = Progress()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = asyncio.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> str:
        """Listen; returns the address, "" if nobody listens."""
        http = self._config.telemetry.http
        if not http.is_on or http.port is None:
            return ""
        try:
            family, _, _, _, where = socket.getaddrinfo(http.host, http.port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(where[:2], family=family)
        except OSError as error:
            log.warning(f"telemetry.http: cannot listen on {http.host!r}, port {http.port}: no metrics. {error}")
            return ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(self._loop, listener), name="metrics", daemon=True)
        self._thread.start()
        return _address(*listener.getsockname()[:2])

    def serving(self, epoch: int, version: int) -> None:
        """Rollout servers can fetch the weights of `version`: this trainer is ready."""
        self._progress = self._progress.serving(epoch, version)

    def step(self, row: Mapping[str, Any]) -> None:
        """A finished step."""
        self._progress = self._progress.after(row)

    def close(self) -> None:
        """Stop listening; a thread that does not end by then ends with the process."""
        if self._loop is not None and self._thread is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended before
                self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(CLOSE_S)

    def _run(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(self._serve(listener))
        except Exception:  # no fault of a page of figures may end a training
            log.exception("/metrics is gone")
        finally:
            listener.close()

    async def _serve(self, listener: socket.socket) -> None:
        page = _Page(self._config)
        busy = 0

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal busy
            busy += 1
            try:
                if busy <= MAX_CONNECTIONS:
                    async with asyncio.timeout(REQUEST_S):
                        head = await reader.readuntil(b"\r\n\r\n")
                        writer.write(_response(*await page.of(head, self._progress)))
                        await writer.drain()
            except (OSError, EOFError, asyncio.LimitOverrunError):  # TimeoutError is an OSError: a client that is gone
                pass
            finally:
                busy -= 1
                writer.close()

        server = await asyncio.start_server(answer, sock=listener, limit=MAX_HEAD_BYTES)
        try:
            await self._closing.wait()
        finally:
            server.close()
            await page.aclose()


class _Page:
    """What is answered to whom."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._collector = TrainerCollector(config)
        self._registry = CollectorRegistry()
        self._registry.register(self._collector)
        ProcessCollector(registry=self._registry)
        self._buffer: RedisBuffer | None = None
        self._asking = asyncio.Lock()
        self._asked_at_s = -STATS_MAX_AGE_S

    async def of(self, head: bytes, progress: Progress) -> tuple[int, str, bytes]:
        """(status, content type, body)."""
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method != b"GET":
            return 405, PLAIN, b"GET\n"
        if path == b"/healthz":
            return 200, PLAIN, b"alive\n"
        if path == b"/readyz":
            return (200, PLAIN, b"ready\n") if progress.ready else (503, PLAIN, b"no weights are served yet\n")
        if path != b"/metrics":
            return 404, PLAIN, b"/metrics /healthz /readyz\n"
        async with self._asking:
            await self._ask(progress)
            self._collector.progress = progress
            return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)

    async def aclose(self) -> None:
        """Close the connection to the buffer."""
        if self._buffer is not None:
            await self._buffer.aclose()

    async def _ask(self, progress: Progress) -> None:
        """Not before the training has taken over the run; after that at most once a second."""
        if not progress.ready or time.monotonic() - self._asked_at_s < STATS_MAX_AGE_S:
            return
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                if self._buffer is None:
                    self._buffer = await open_run(self._config)
                self._collector.stats = await self._buffer.stats()
        except (AsyncGrpoError, TimeoutError):
            self._collector.stats = None  # `async_grpo_trainer_buffer_up` says so
        self._asked_at_s = time.monotonic()


def _response(status: int, kind: str, body: bytes) -> bytes:
    reason = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}[status]
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    return head.encode() + b"\r\n" + body


def _address(host: str, port: int) -> str:
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        return f"http://{socket.gethostname()}:{port}"
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"
