"""/metrics, for Prometheus: the values of `SERVER_METRICS`, by key.

The counters of a server start again at 0 when its engine is restarted, as Prometheus expects of a process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from async_grpo.telemetry.metrics import SERVER_METRICS, ServerMetric
from buffer import BufferStats, CachedStats
from rollout_server.http.context import HttpContext, ReadyServer

Values = dict[str, float | Mapping[Any, float]]
"""Key -> value, or the values by label."""


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
    """Collects `SERVER_METRICS` at every request."""

    def __init__(self, http: HttpContext, recent: CachedStats) -> None:
        self._http = http
        self._recent = recent

    def collect(self) -> Iterable[Metric]:
        """The families of this server, as far as it has values for them."""
        http = self._http
        values: Values = {
            "server_info": {(http.config.name, http.name): 1},
            "ready": not http.why_not_ready,
            "http_responses_total": http.responses,
        }
        if http.server is not None:
            values |= _engine_values(http.server) | _group_values(http.server)
            values |= _window_values(self._recent.stats, http.server.context.engine.version)
        return [_family(metric, values[metric.key]) for metric in SERVER_METRICS if metric.key in values]


def _engine_values(server: ReadyServer) -> Values:
    engine, watcher, load = server.context.engine, server.watcher, server.context.engine.load()
    proof = server.context.proof
    return {
        **({} if proof is None else {"logprob_proof_gap": proof.gap_max}),
        "generated_tokens_total": load.generated_tokens,
        "evaluation_tokens_total": server.evaluator.tokens,
        "http_tokens_total": load.streamed_tokens,
        "requests_running": load.running,
        "requests_waiting": load.waiting,
        "kv_cache_use_ratio": load.kv_use,
        "http_completions_running": server.jobs.busy,
        "policy_version": engine.version,
        "policy_epoch": watcher.applied.epoch,
        "weight_updates_total": watcher.updates,
        "weight_transfer_seconds": watcher.last_transfer_s,
        "weight_pause_seconds": watcher.last_pause_s,
        "weight_load_seconds": watcher.last_load_s,
        "disputed_spans_total": load.disputed_spans,
    }


def _group_values(server: ReadyServer) -> Values:
    dispatcher = server.dispatcher
    return {
        "concurrency_limit_samples": dispatcher.slots.capacity,
        "samples_running": dispatcher.slots.in_use,
        "admission_open": dispatcher.admission.is_open,
        "leases": len(dispatcher.groups),
        "leases_lost_total": dispatcher.groups.lost_leases,
        "groups_total": dispatcher.counters.groups,
        "samples_total": dispatcher.counters.samples,
        "reward_failures_total": dispatcher.counters.reward_failures,
    }


def _window_values(stats: BufferStats | None, version: int) -> Values:
    if stats is None:
        return {"buffer_up": 0}
    return {
        "buffer_up": 1,
        "policy_versions_behind": max(0, stats.version - version),
        "window_groups": stats.active,
        "window_capacity_groups": stats.capacity,
        "window_fill_ratio": stats.active / stats.capacity,
        "buffer_groups": {state: getattr(stats, state) for state in ("waiting", "inflight", "ready", "taken")},
    }


def _family(metric: ServerMetric, value: float | Mapping[Any, float]) -> Metric:
    kind = CounterMetricFamily if metric.key.endswith("_total") else GaugeMetricFamily
    family = kind(f"async_grpo_{metric.key}", metric.doc, labels=metric.labels)
    by_labels = value if isinstance(value, Mapping) else {(): value}
    for labels, number in list(by_labels.items()):
        family.add_metric([labels] if isinstance(labels, str) else [str(label) for label in labels], float(number))
    return family
