"""/metrics, for Prometheus. docs/http.md has the table; a test compares the two.

The counters of a server start again at 0 when its engine is restarted, as Prometheus expects of a process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from buffer import BufferStats, CachedStats
from rollout_server.http.context import HttpContext, ReadyServer


def metrics_routes(http: HttpContext) -> APIRouter:
    """The route /metrics. It needs no key and shows no text of prompts or completions."""
    registry = CollectorRegistry()
    recent = CachedStats()
    registry.register(ServerCollector(http, recent))
    ProcessCollector(registry=registry)
    routes = APIRouter()

    @routes.get("/metrics")
    async def metrics() -> Response:
        if http.server is not None:
            await recent.refresh(http.server.context.buffer.stats)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return routes


class ServerCollector(Collector):
    """Collects the metrics of the server at every request."""

    def __init__(self, http: HttpContext, recent: CachedStats) -> None:
        self._http = http
        self._recent = recent

    def collect(self) -> Iterable[Metric]:
        """All families of this server."""
        http = self._http
        info = GaugeMetricFamily("async_grpo_server_info", "This server, always 1", labels=["run", "server"])
        info.add_metric([http.config.name, http.name], 1)
        yield info
        yield _gauge("async_grpo_ready", "1: ready for completions and training", float(not http.why_not_ready))
        responses = CounterMetricFamily(
            "async_grpo_http_responses", "Answers over HTTP, by route and status", labels=["route", "status"]
        )
        for (route, status), number in list(http.responses.items()):
            responses.add_metric([route, str(status)], number)
        yield responses
        if http.server is not None:
            yield from _of_engine(http.server)
            yield from _of_groups(http.server)
            yield from _of_window(self._recent.stats, http.server.context.engine.version)


def _of_engine(server: ReadyServer) -> Iterable[Metric]:
    engine, watcher = server.context.engine, server.watcher
    load = engine.load()
    yield _count("async_grpo_generated_tokens", "Made for training and evaluation", load.generated_tokens)
    yield _count("async_grpo_evaluation_tokens", "Of those, made for evaluation", server.evaluator.tokens)
    yield _count("async_grpo_http_tokens", "Made for HTTP; in no other counter", load.streamed_tokens)
    yield _gauge("async_grpo_requests_running", "In the engine, with a first token", load.running)
    yield _gauge("async_grpo_requests_waiting", "In the engine, without a token", load.waiting)
    yield _gauge("async_grpo_kv_cache_use_ratio", "Of the KV cache, by requests in flight; 0 if unknown", load.kv_use)
    yield _gauge("async_grpo_http_completions_running", "Under way for HTTP", server.jobs.busy)
    yield _gauge("async_grpo_policy_version", "Of the weights that the next token comes from", engine.version)
    yield _gauge("async_grpo_policy_epoch", "Of those weights", watcher.applied.epoch)
    yield _count("async_grpo_weight_updates", "Applied", watcher.updates)
    yield _gauge("async_grpo_weight_pause_seconds", "Without a token, in the last update", watcher.last_pause_s)


def _of_groups(server: ReadyServer) -> Iterable[Metric]:
    dispatcher = server.dispatcher
    slots, counters = dispatcher.slots, dispatcher.counters
    yield _gauge("async_grpo_concurrency_limit_samples", "That may run for training at once", slots.capacity)
    yield _gauge("async_grpo_samples_running", "For training", slots.in_use)
    yield _gauge("async_grpo_admission_open", "1: takes up new groups", float(dispatcher.admission.is_open))
    yield _gauge("async_grpo_leases", "Groups in work", len(dispatcher.leases))
    yield _count("async_grpo_leases_lost", "Groups dropped because another server has them", dispatcher.leases.lost)
    yield _counts("async_grpo_groups", "That ended here", "outcome", counters.groups)
    yield _counts("async_grpo_samples", "Of inserted groups", "finish_reason", counters.samples)
    yield _counts("async_grpo_reward_failures", "Completions that were not judged", "kind", counters.reward_failures)


def _of_window(stats: BufferStats | None, version: int) -> Iterable[Metric]:
    yield _gauge("async_grpo_buffer_up", "1: the buffer answered", float(stats is not None))
    if stats is None:
        return
    capacity = (stats.max_staleness + 1) * stats.groups_per_step
    yield _gauge("async_grpo_window_groups", "Active in the whole run", stats.active)
    yield _gauge("async_grpo_window_capacity_groups", "(S + 1) * P", capacity)
    yield _gauge("async_grpo_window_fill_ratio", "1: the trainer is the bottleneck", stats.active / capacity)
    yield _gauge("async_grpo_policy_versions_behind", "The newest published", max(0, stats.version - version))
    states = {"waiting": stats.waiting, "inflight": stats.inflight, "ready": stats.ready, "taken": stats.taken}
    groups = GaugeMetricFamily("async_grpo_buffer_groups", "Of the whole run, by state", labels=["state"])
    for state, number in states.items():
        groups.add_metric([state], number)
    yield groups


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value=value)


def _count(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(name, help_text, value=value)


def _counts(name: str, help_text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=[label])
    for key, value in list(values.items()):
        family.add_metric([key], value)
    return family
