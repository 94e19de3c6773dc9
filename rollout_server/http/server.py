"""The HTTP server of a rollout server: opens its socket before the engine starts, and closes it after the engine ended.

It waits for connections, and runs in the event loop of the rollout server.
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
"""Ports tried from rollout.http.port on; as many servers may share a machine."""

log = structlog.get_logger()


class ApiServer:
    """`open`, then `attach` once there is something to serve, `detach` before that goes, `aclose`."""

    def __init__(self, config: RunConfig, name: str, prompts: PromptEncoder) -> None:
        """Raises ConfigError if anybody on the network could use the server."""
        self._config = config.rollout.http
        self._http = HttpContext(config, name, ApiKeys.of(os.environ, self._config), prompts)
        self._listening: asyncio.Task[None] | None = None
        self._server = HttpServer(make_app(self._http), MAX_REQUESTS)
        self.address = ""
        """`http://host:port`, once it is open."""

    async def open(self) -> None:
        """Listen. Raises ConfigError if there is no free port, or no such host."""
        assert self._config.port is not None
        listener = bind(self._config.host, self._config.port)
        self.address = address_of(*listener.getsockname()[:2])
        self._listening = asyncio.create_task(self._server.serve(listener), name="http")
        log.info("http", address=self.address)

    async def run_serving(self) -> None:
        """Wait until cancelled; raises the error that ended the server."""
        assert self._listening is not None
        await asyncio.shield(self._listening)

    def attach(
        self, context: ServerContext, watcher: WeightWatcher, dispatcher: Dispatcher, evaluator: MilestoneEvaluator
    ) -> None:
        """Serve completions from now on: the engine has its first weights."""
        jobs = CompletionJobs(context.engine, self._config.max_concurrency)
        self._http.server = ReadyServer(context, watcher, dispatcher, evaluator, jobs)

    async def finish_completions(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for completions under way, then end them; for a server that drains."""
        if self._http.server is not None:
            await self._http.server.jobs.finish(timeout_s)

    async def detach(self) -> None:
        """End completions under way, before the engine is closed."""
        if (server := self._http.server) is not None:
            self._http.server, self._http.missing = None, LEAVING
            await server.jobs.close()

    async def aclose(self) -> None:
        """Close the socket and all connections."""
        if self._listening is not None:
            self._server.stop()
            await self._listening


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on the port, or on the next free one above it (0: any). Raises ConfigError."""
    last: OSError | None = None
    for candidate in range(port, min(port + PORTS_TRIED, 65536)) if port else [0]:
        try:
            return listen(host, candidate)
        except OSError as error:
            last = error
    raise ConfigError(
        f"rollout.http: cannot listen on {host!r}, port {port} and the {PORTS_TRIED - 1} above it: {last}. "
        "Set rollout.http.host to an address of this machine, and rollout.http.port to a free one, to 0 (any), or "
        "to -1 (off)"
    ) from last
