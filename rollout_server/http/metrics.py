"""/metrics, for Prometheus: the values of `SERVER_METRICS`, by key.

A server's counters restart at 0 when its engine is restarted; Prometheus handles such resets.
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
"""Value, or values by label, per key."""


def metrics_routes(http: HttpContext) -> APIRouter:
    """Route /metrics. It needs no key and shows no text of prompts or completions."""
    registry = CollectorRegistry()
    cached_stats = CachedStats()
    registry.register(ServerCollector(http, cached_stats))
    ProcessCollector(registry=registry)
    routes = APIRouter()

    @routes.get("/metrics")
    async def metrics() -> Response:
        if http.server is not None:
            await cached_stats.refresh(http.server.context.buffer.stats)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return routes


class ServerCollector(Collector):
    """Collects `SERVER_METRICS` for every request."""

    def __init__(self, http: HttpContext, cached_stats: CachedStats) -> None:
        self._http = http
        self._cached_stats = cached_stats

    def collect(self) -> Iterable[Metric]:
        """Return the metric families for which this server has values."""
        http = self._http
        values: Values = {
            "server_info": {(http.config.name, http.name): 1},
            "ready": http.not_ready_reason is None,
            "http_responses_total": http.responses,
        }
        if http.server is not None:
            values |= _engine_values(http.server)
            values |= _group_values(http.server)
            values |= _window_values(self._cached_stats.stats, http.server.context.engine.version)
        return [_family(metric, values[metric.key]) for metric in SERVER_METRICS if metric.key in values]


def _engine_values(server: ReadyServer) -> Values:
    engine = server.context.engine
    watcher = server.watcher
    load = engine.load()
    values: Values = {
        "generated_tokens_total": load.generated_tokens,
        "evaluation_tokens_total": server.evaluator.tokens,
        "http_tokens_total": load.streamed_tokens,
        "requests_running": load.running,
        "requests_waiting": load.waiting,
        "kv_cache_use_ratio": load.kv_use,
        "http_completions_running": server.jobs.running,
        "policy_version": engine.version,
        "policy_epoch": watcher.applied.epoch,
        "weight_updates_total": watcher.updates,
        "weight_transfer_seconds": watcher.last_transfer_s,
        "weight_pause_seconds": watcher.last_pause_s,
        "weight_load_seconds": watcher.last_load_s,
        "disputed_spans_total": load.disputed_spans,
    }
    proof = server.context.proof
    if proof is not None:
        values["logprob_proof_gap"] = proof.gap_max
    return values


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
    values_by_labels = value if isinstance(value, Mapping) else {(): value}
    for key, number in list(values_by_labels.items()):
        labels = [key] if isinstance(key, str) else [str(label) for label in key]
        family.add_metric(labels, float(number))
    return family
