"""Writes dashboards/async-grpo.json from the table ROWS: python deploy/grafana/make_dashboard.py

Panels that other displays share take title, unit and labels from `telemetry.charts`. Panels for operations exist only
here. One test compares the file with the table, another runs every query against a Prometheus that scrapes a run.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.telemetry.charts import (
    AGES,
    BUFFER,
    IDLE,
    METRIC_CHARTS,
    RELEASED,
    REWARD,
    REWARD_BY_FUNCTION,
    STEP_TIME,
    TRAINER_IDLE,
    Chart,
    Kind,
)
from async_grpo.telemetry.metrics import METRICS

FILE = Path(__file__).parent / "dashboards" / "async-grpo.json"
WIDTH, HEIGHT = 8, 7
"""Size of a panel. Grafana's grid has 24 columns."""

UNITS = {"s": "s", "share": "percentunit"}
"""Unit of a chart -> unit in Grafana. All others are `short`, a plain number."""

TRAINER_TIME = "async_grpo_trainer_phase_seconds_total"

QUERIES = {
    **{metric.key: f"async_grpo_trainer_{metric.gauge}" for metric in METRICS if metric.gauge},
    "age_bound": "async_grpo_trainer_age_bound_steps",
    TRAINER_IDLE: f'sum(rate({TRAINER_TIME}{{phase="wait"}}[5m])) / sum(rate({TRAINER_TIME}[5m]))',
    "buffer_groups.inflight": 'max(async_grpo_buffer_groups{state="inflight"})',
    "buffer_groups.ready": 'max(async_grpo_buffer_groups{state="ready"})',
}
"""Key of a curve -> its query. Prometheus has no data for the other curves of `telemetry.charts`."""


@dataclass(frozen=True)
class Panel:
    """A panel of the dashboard."""

    title: str
    unit: str
    """Unit in Grafana."""
    queries: dict[str, str]
    """Query -> legend."""
    stacked: bool = False


def chart_panel(chart: Chart, extra_queries: dict[str, str] | None = None) -> Panel:
    """Return a panel with `extra_queries` and the curves of a chart that Prometheus has."""
    queries = {QUERIES[series.key]: series.label for series in chart.series if series.key in QUERIES}
    queries.update(extra_queries or {})
    return Panel(chart.heading, UNITS.get(chart.unit, "short"), queries, chart.kind is Kind.STACKED)


def metrics_panel(title: str, *keys: str) -> Panel:
    """Return a panel with several metrics, which must have the same unit."""
    (unit,) = {METRIC_CHARTS[key].unit for key in keys}
    return Panel(title, UNITS.get(unit, "short"), {QUERIES[key]: METRIC_CHARTS[key].title for key in keys})


ROWS: dict[str, list[Panel]] = {
    "Throughput and idle": [
        Panel(
            "Optimizer steps",
            "short",
            {"async_grpo_trainer_version": "trained", "async_grpo_trainer_target_version": "target"},
        ),
        Panel(
            "Tokens per second",
            "short",
            {
                "sum(rate(async_grpo_generated_tokens_total[5m]))": "generated",
                "sum(rate(async_grpo_trainer_trained_tokens_total[5m]))": "trained",
            },
        ),
        Panel(
            f"{STEP_TIME.title.capitalize()}, share of each part",
            "percentunit",
            {f"rate({TRAINER_TIME}[5m])": "{{phase}}"},
            stacked=STEP_TIME.kind is Kind.STACKED,
        ),
        # Free slots are only an approximation of ROLLOUT_IDLE, which needs the spans of every server.
        chart_panel(
            IDLE,
            {
                "1 - sum(async_grpo_samples_running) / sum(async_grpo_concurrency_limit_samples)": "free slots of the "
                "rollout servers"
            },
        ),
        Panel("Time since the last step", "s", {"time() - async_grpo_trainer_last_step_timestamp_seconds": "trainer"}),
        Panel(
            "Engines",
            "short",
            {
                "async_grpo_requests_running": "running {{instance}}",
                "async_grpo_requests_waiting": "waiting {{instance}}",
                "100 * async_grpo_kv_cache_use_ratio": "KV cache, % {{instance}}",
            },
        ),
    ],
    "Staleness": [
        chart_panel(AGES),
        Panel("Staleness window, used share", "percentunit", {"max(async_grpo_window_fill_ratio)": "window"}),
        metrics_panel("Off-policy metrics", "ess", "clip_fraction"),
    ],
    "Weights": [
        Panel(
            "Weight versions",
            "short",
            {"async_grpo_trainer_version": "trainer", "async_grpo_policy_version": "{{instance}}"},
        ),
        Panel("Weight versions behind the trainer", "short", {"async_grpo_policy_versions_behind": "{{instance}}"}),
        Panel(
            "Last weight update, by server",
            "s",
            {
                "async_grpo_weight_transfer_seconds": "transfer, {{instance}}",
                "async_grpo_weight_pause_seconds": "pause, {{instance}}",
                "async_grpo_weight_load_seconds": "load, {{instance}}",
            },
        ),
    ],
    "Buffer": [
        chart_panel(
            BUFFER,
            {'max by (state) (async_grpo_buffer_groups{state!~"inflight|ready"})': "{{state}}"},
        ),
        Panel(
            f"{RELEASED.heading}, per minute",
            "short",
            {"60 * rate(async_grpo_run_released_groups_total[5m])": "{{reason}}"},
        ),
        Panel(
            "Redis memory",
            "bytes",
            {
                "async_grpo_run_redis_memory_bytes": "used",
                "async_grpo_run_redis_memory_limit_bytes": "limit",
                "async_grpo_run_stored_bytes": "finished groups of the run",
            },
        ),
    ],
    "Rewards": [
        metrics_panel(f"{REWARD.heading} of the last step", "reward_mean", "reward_std"),
        chart_panel(REWARD_BY_FUNCTION, {"async_grpo_trainer_reward_by_function": "{{function}}"}),
        metrics_panel("Informative groups and truncated completions", "informative_groups", "truncated_fraction"),
        chart_panel(METRIC_CHARTS["completion_tokens_mean"]),
        metrics_panel("Loss and gradient norm", "loss", "grad_norm"),
        metrics_panel("Entropy, log-probability gap and KL (nats)", "entropy_estimate", "logprob_gap_mean", "kl"),
    ],
    "Faults": [
        Panel("Reachable roles", "short", {'up{job=~"trainer|rollout"}': "{{job}} {{instance}}"}),
        Panel(
            "Trainer restarts and skipped steps",
            "short",
            {
                "max(async_grpo_trainer_epoch) - 1": "trainer restarts",
                "async_grpo_trainer_skipped_steps_total": "skipped steps",
            },
        ),
        Panel(
            "Lost leases, groups and rewards, per minute",
            "short",
            {
                "60 * sum(rate(async_grpo_leases_lost_total[5m]))": "leases",
                '60 * sum by (outcome) (rate(async_grpo_groups_total{outcome!="inserted"}[5m]))': "groups: {{outcome}}",
                "60 * sum by (kind) (rate(async_grpo_reward_failures_total[5m]))": "rewards: {{kind}}",
            },
        ),
        Panel(
            "Disk space of the run folder",
            "bytes",
            {"async_grpo_trainer_disk_free_bytes": "free", "async_grpo_trainer_disk_size_bytes": "size"},
        ),
        Panel(
            "Process memory",
            "bytes",
            {'process_resident_memory_bytes{job=~"trainer|rollout"}': "{{job}} {{instance}}"},
        ),
        Panel("Active alerts", "short", {"ALERTS": "{{alertname}}, {{alertstate}}"}),
    ],
}


def make_dashboard() -> dict[str, Any]:
    """Return the dashboard in Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row_panels in ROWS.items():
        position = make_position(0, top, 24, 1)
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": position, "panels": []})
        for index, panel in enumerate(row_panels):
            position = make_position(WIDTH * (index % 3), top + 1 + HEIGHT * (index // 3), WIDTH, HEIGHT)
            panels.append(make_panel(panel, position))
        top += 1 + HEIGHT * math.ceil(len(row_panels) / 3)
    numbered = [{"id": number, **panel} for number, panel in enumerate(panels, 1)]
    return {
        "uid": "async-grpo",
        "title": "async_grpo",
        "tags": ["async_grpo"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "panels": numbered,
    }


def make_position(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def make_panel(panel: Panel, position: dict[str, int]) -> dict[str, Any]:
    """Return a panel in Grafana's JSON model."""
    source = {"type": "prometheus", "uid": "prometheus"}
    targets = []
    for index, (query, legend) in enumerate(panel.queries.items()):
        targets.append({"refId": chr(ord("A") + index), "datasource": source, "expr": query, "legendFormat": legend})
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0 if panel.unit in ("s", "bytes") else None}
    if panel.stacked:
        defaults["custom"] = {"fillOpacity": 30, "stacking": {"mode": "normal", "group": "A"}}
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "gridPos": position,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def format_dashboard() -> str:
    """Return the content of the dashboard file."""
    return json.dumps(make_dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(format_dashboard())
