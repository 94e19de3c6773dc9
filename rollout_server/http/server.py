"""HTTP server of a rollout server: opens its socket before the engine starts, and closes it after the engine has ended.

It waits for connections in the event loop of the rollout server.
"""

from __future__ import annotations

import asyncio
import os
import socket

import structlog

from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError
from async_grpo.utils.http_server import HttpServer, address_of, listen
from rollout_server.context import ServerContext
from rollout_server.dispatch.dispatcher import Dispatcher
from rollout_server.evaluation.milestones import MilestoneEvaluator
from rollout_server.http.app import make_app
from rollout_server.http.context import LEAVING, ApiKeys, HttpContext, ReadyServer
from rollout_server.http.jobs import CompletionJobs
from rollout_server.http.prompts import PromptEncoder
from rollout_server.weight_watcher import WeightWatcher

MAX_REQUESTS = 256
PORTS_TRIED = 64
"""Number of ports tried from rollout.http.port on, and of servers that can share a machine."""

log = structlog.get_logger()


class ApiServer:
    """Socket and application, in this order of calls:

    open    -->  attach            -->  detach              -->  aclose
    socket       engine is ready        engine is closing        all connections
    """

    def __init__(self, config: RunConfig, name: str, prompts: PromptEncoder) -> None:
        """Raises ConfigError for a server that anybody on the network could use."""
        self._config = config.rollout.http
        self._http = HttpContext(config, name, ApiKeys.from_environment(os.environ, self._config), prompts)
        self._listening: asyncio.Task[None] | None = None
        self._server = HttpServer(make_app(self._http), MAX_REQUESTS)
        self.address = ""
        """`http://host:port`; "" before `open`."""

    async def open(self) -> None:
        """Listen. Raises ConfigError if no port is free, or the host is not an address of this machine."""
        assert self._config.port is not None
        listener = bind(self._config.host, self._config.port)
        self.address = address_of(*listener.getsockname()[:2])
        self._listening = asyncio.create_task(self._server.serve(listener), name="http")
        log.info("http", address=self.address)

    async def run_serving(self) -> None:
        """Wait until cancelled; raises the error that ended the HTTP server."""
        assert self._listening is not None
        # Shielded: /readyz still answers while the other parts of the server are closed. `aclose` ends it.
        await asyncio.shield(self._listening)

    def attach(
        self, context: ServerContext, watcher: WeightWatcher, dispatcher: Dispatcher, evaluator: MilestoneEvaluator
    ) -> None:
        """Start serving completions: the engine has its first weights."""
        jobs = CompletionJobs(context.engine, self._config.max_concurrency)
        self._http.server = ReadyServer(context, watcher, dispatcher, evaluator, jobs)

    async def finish_completions(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for running completions, then cancel them. For a draining server."""
        if self._http.server is not None:
            await self._http.server.jobs.finish_completions(timeout_s)

    async def detach(self) -> None:
        """Cancel running completions, before the engine is closed."""
        server = self._http.server
        if server is not None:
            self._http.server = None
            self._http.absence_reason = LEAVING
            await server.jobs.close()

    async def aclose(self) -> None:
        """Close the socket and all connections."""
        if self._listening is not None:
            self._server.stop()
            await self._listening


def bind(host: str, port: int) -> socket.socket:
    """Listen on the port, or on the next free one above it (0: any). Raises ConfigError."""
    candidates = [0]
    if port:
        candidates = list(range(port, min(port + PORTS_TRIED, 65536)))

    last_error: OSError | None = None
    for candidate in candidates:
        try:
            return listen(host, candidate)
        except OSError as error:
            last_error = error
    raise ConfigError(
        f"rollout.http: cannot listen on {host!r}, port {port} and the {PORTS_TRIED - 1} above it: {last_error}. "
        "Set rollout.http.host to an address of this machine, and rollout.http.port to a free one, to 0 (any), or "
        "to -1 (off)"
    ) from last_error
