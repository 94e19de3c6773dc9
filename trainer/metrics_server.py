"""/metrics, /healthz and /readyz of the trainer, served by a background thread on rank 0.

    TrainerLogger --row of a step--> TrainerProgress --> TrainerCollector <--GET-- Prometheus, health checks
                                                            |
                                                            +--stats, at most once a second--> buffer

Training never waits for it: a step replaces one reference. If it cannot listen or fails, there is a warning and
training continues. Counters belong to this process and start at 0, as Prometheus expects; those of the whole run are
named `async_grpo_run_*`. docs/http.md has the table.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from async_grpo.config import RunConfig
from async_grpo.telemetry.metrics import METRICS, PHASES
from async_grpo.telemetry.servers_wanted import MAX_SERVERS, STEPS, ServerDemand
from async_grpo.telemetry.timeline import START
from async_grpo.utils.http_server import HttpServer, address_of, listen
from buffer import CachedStats, RedisBuffer, RunBoard, attach, attach_board
from buffer.base import BufferStats

MAX_REQUESTS = 64
"""Requests at a time; further ones are rejected."""
CLOSE_S = 5.0
"""Seconds to wait for the thread of the server when the trainer ends."""
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class TrainerProgress:
    """Progress of this process."""

    ready: bool = False
    """True once rollout servers can fetch weights from it."""
    epoch: int = 0
    """0 until this trainer has taken over the run, which may not exist before."""
    version: int = 0
    """Version of the trainer's weights; during a replay, servers have newer ones."""
    steps: int = 0
    skipped: int = 0
    replayed: int = 0
    groups: int = 0
    tokens: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds spent, by phase."""
    latest: Mapping[str, Any] = field(default_factory=dict)
    """Row of the last step."""

    def after_step(self, row: Mapping[str, Any]) -> TrainerProgress:
        """Return the progress after one more step. `row`: see `step_row`."""
        seconds = {name: self.seconds.get(name, 0.0) + row.get(f"{name}_s", 0.0) for name in (START, *PHASES)}
        return replace(
            self,
            epoch=row["epoch"],
            version=row["step"],
            steps=self.steps + 1,
            skipped=self.skipped + row["skipped_steps"],
            replayed=self.replayed + int(row["replayed"]),
            groups=self.groups + row["groups"],
            tokens=self.tokens + row.get("trained_tokens", 0),
            seconds=seconds,
            latest=row,
        )


class TrainerCollector(Collector):
    """Metric families of one scrape. `progress` and `stats` must be set before."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.progress = TrainerProgress()
        self.stats: BufferStats | None = None
        """None if the buffer did not answer."""
        self.memory = (0, 0)
        """Bytes that the buffer's server used when it last answered, and its limit (0 without a limit)."""
        self.servers_wanted: int | None = None
        """None until enough steps have been measured."""

    def collect(self) -> Iterable[Metric]:
        """Yield all metric families."""
        config, progress = self._config, self.progress
        info = GaugeMetricFamily("async_grpo_trainer_info", "This trainer, always 1", labels=["run"])
        info.add_metric([config.name], 1)
        yield info
        yield _gauge("ready", "1 once rollout servers can fetch weights from this trainer", float(progress.ready))
        yield _gauge("version", "Version of the trainer's weights, in optimizer steps", progress.version)
        yield _gauge("epoch", "Epoch of this trainer; rises by one each time a trainer takes over", progress.epoch)
        yield _gauge("target_version", "Version at which the run ends", config.steps)
        yield _gauge("age_bound_steps", "Largest age that a trained token can have", config.replay_policy.age_bound)
        yield from _step_metrics(progress, config.group_size)
        for metric in METRICS:
            if metric.gauge and metric.key in progress.latest:
                yield _gauge(metric.gauge, metric.doc, progress.latest[metric.key])
        rewards = GaugeMetricFamily(
            "async_grpo_trainer_reward_by_function", "Mean score of the last step, before weights", labels=["function"]
        )
        for name, mean in progress.latest.get("reward_by_function", {}).items():
            rewards.add_metric([name], mean)
        yield rewards
        if self.servers_wanted is not None:
            yield _gauge("servers_wanted", "Rollout servers that the run can use", self.servers_wanted)
        yield from _disk_metrics(config.run_dir)
        yield from _group_metrics(self.stats)
        if self.stats is not None:
            used, limit = self.memory
            yield GaugeMetricFamily(
                "async_grpo_run_redis_memory_bytes", "Bytes that the buffer's server uses", value=used
            )
            yield GaugeMetricFamily(
                "async_grpo_run_redis_memory_limit_bytes",
                "Bytes that the buffer's server may use; 0: it has no limit",
                value=limit,
            )


def _disk_metrics(folder: Path) -> Iterable[Metric]:
    # The run folder may not exist yet. Its nearest existing parent is on the same disk.
    try:
        absolute = folder.absolute()
        existing = next(path for path in (absolute, *absolute.parents) if path.exists())
        disk = shutil.disk_usage(existing)
    except OSError:
        return
    yield _gauge("disk_free_bytes", "Free bytes of the disk that has the run folder", disk.free)
    yield _gauge("disk_size_bytes", "Size of that disk in bytes", disk.total)


def _step_metrics(progress: TrainerProgress, group_size: int) -> Iterable[Metric]:
    yield _count("steps", "Steps made by this process, including skipped ones", progress.steps)
    yield _count("skipped_steps", "Steps whose loss or gradient was not finite", progress.skipped)
    yield _count("replayed_steps", "Steps repeated after a crash", progress.replayed)
    yield _count("groups", "Groups of the steps", progress.groups)
    yield _count("samples", "Samples of those groups", progress.groups * group_size)
    yield _count("trained_tokens", "Tokens that got a gradient, counting each use", progress.tokens)
    yield _counts("async_grpo_trainer_phase_seconds", "Seconds of the steps by phase", "phase", progress.seconds)
    if progress.latest:
        yield _gauge("last_step_timestamp_seconds", "When the last step ended, as Unix time", progress.latest["time_s"])


def _group_metrics(stats: BufferStats | None) -> Iterable[Metric]:
    yield _gauge("buffer_up", "1 if the buffer answered", float(stats is not None))
    if stats is None:
        return
    yield CounterMetricFamily("async_grpo_run_admitted_groups", "Groups admitted by all servers", value=stats.admitted)
    yield _counts("async_grpo_run_released_groups", "Groups released, by reason", "reason", stats.released)
    yield GaugeMetricFamily("async_grpo_run_active_groups", "Groups admitted and not released", value=stats.active)
    yield GaugeMetricFamily("async_grpo_run_ready_groups", "Finished groups, not yet taken", value=stats.ready)
    yield GaugeMetricFamily(
        "async_grpo_run_stored_bytes", "Bytes of the finished groups on the server", value=stats.stored_bytes
    )
    yield GaugeMetricFamily(
        "async_grpo_run_room_bytes",
        "Bytes that redis.quota_bytes leaves for finished groups; 0: no quota",
        value=stats.room_bytes,
    )


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"async_grpo_trainer_{name}", help_text, value=value)


def _count(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(f"async_grpo_trainer_{name}", help_text, value=value)


def _counts(name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


class MetricsServer:
    """Serves the pages from a background thread, between `start` and `close`.

    The training thread calls `mark_joined`, `mark_ready` and `record_step`. Only `start` raises, and no call waits for
    a client. `_progress` is immutable: the training thread replaces it, and the thread of the pages reads it.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._http = config.telemetry.http
        self._progress = TrainerProgress()
        self._collector = TrainerCollector(config)
        self._registry = CollectorRegistry()
        self._registry.register(self._collector)
        ProcessCollector(registry=self._registry)
        self._buffer: RedisBuffer | None = None
        self._board: RunBoard | None = None
        self._recent = CachedStats()
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=STEPS)
        self.demand = ServerDemand.of(config)
        """Updated at each scrape, by the thread of the pages."""
        # The pages need no key: they show no text of samples.
        pages = {"/healthz": self._healthz, "/readyz": self._readyz, "/metrics": self._metrics}
        app = Starlette(routes=[Route(path, page, methods=["GET"]) for path, page in pages.items()])
        self._server = HttpServer(app, MAX_REQUESTS)
        self._thread: threading.Thread | None = None

    def start(self) -> str | None:
        """Start the thread and return the address; None if the pages are off. Raises OSError if it cannot listen."""
        if not self._http.is_on or self._http.port is None:
            return None
        listener = listen(self._http.host, self._http.port)
        address = address_of(*listener.getsockname()[:2])
        self._thread = threading.Thread(target=self._run, args=(listener,), name="metrics", daemon=True)
        self._thread.start()
        return address

    def mark_joined(self, epoch: int, version: int) -> None:
        """Record that this trainer has taken over the run at `version`. From now on scrapes query the buffer."""
        self._progress = replace(self._progress, epoch=epoch, version=version)

    def mark_ready(self) -> None:
        """Record that rollout servers can fetch the weights of this trainer's version."""
        self._progress = replace(self._progress, ready=True)

    def record_step(self, row: Mapping[str, Any]) -> None:
        """Count a finished step."""
        self._progress = self._progress.after_step(row)
        self._rows.append(row)

    def close(self) -> None:
        """Stop listening. If the thread does not end in CLOSE_S, it ends with the process."""
        if self._thread is not None:
            self._server.stop()
            self._thread.join(CLOSE_S)

    def _run(self, listener: socket.socket) -> None:
        try:
            asyncio.run(self._serve(listener))
        except Exception:  # a failing metrics page must not end the training
            log.exception("the metrics page failed; training continues without it")
        finally:
            listener.close()

    async def _serve(self, listener: socket.socket) -> None:
        try:
            await self._server.serve(listener)
        finally:
            for connection in (self._buffer, self._board):
                if connection is not None:
                    await connection.aclose()

    async def _healthz(self, _request: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def _readyz(self, _request: Request) -> Response:
        if self._progress.ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": "no weights are served yet"}, 503)

    async def _metrics(self, _request: Request) -> Response:
        progress = self._progress
        if progress.epoch > 0:
            await self._recent.refresh(self._query_buffer)
        self._collector.progress = progress
        self._collector.stats = self._recent.stats
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def _query_buffer(self) -> BufferStats:
        if self._buffer is None or self._board is None:
            self._buffer = attach(self._config.redis, self._config.name)
            self._board = attach_board(self._config.redis, self._config.name)
        self.demand.add_heartbeats(await self._board.live_servers())
        while self._rows:
            self.demand.add_step(self._rows.popleft())
        launch = self._config.launch
        max_servers = launch.kubernetes.max_servers or launch.autoscale.max_servers or MAX_SERVERS
        self._collector.servers_wanted = self.demand.estimate_servers(max_servers)
        self._collector.memory = await self._buffer.read_memory()
        return await self._buffer.stats()
