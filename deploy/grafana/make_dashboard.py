"""dashboards/async-grpo.json from the table below: python deploy/grafana/make_dashboard.py

Curves that other displays have too take title, unit and labels from `telemetry.charts`; panels of operations are here
alone. A test holds file and table together, and runs every query against a Prometheus that scrapes a run.
"""

from __future__ import annotations

import json
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
"""Size of a panel; a row of Grafana has 24 columns."""

UNITS = {"s": "s", "share": "percentunit"}
"""Unit of a chart -> unit as Grafana calls it; `short`, a plain number, for all others."""

TRAINER_TIME = "async_grpo_trainer_phase_seconds_total"

QUERIES = {
    **{metric.key: f"async_grpo_trainer_{metric.gauge}" for metric in METRICS if metric.gauge},
    "age_bound": "async_grpo_trainer_age_bound_steps",
    TRAINER_IDLE: f'sum(rate({TRAINER_TIME}{{phase="wait"}}[5m])) / sum(rate({TRAINER_TIME}[5m]))',
    "buffer_groups.inflight": 'max(async_grpo_buffer_groups{state="inflight"})',
    "buffer_groups.ready": 'max(async_grpo_buffer_groups{state="ready"})',
}
"""Key of a curve -> its query. Prometheus has no other curves of `telemetry.charts`."""


@dataclass(frozen=True)
class Panel:
    """A panel of the dashboard."""

    title: str
    unit: str
    """Unit as Grafana calls it."""
    queries: dict[str, str]
    """Query -> legend."""
    stacked: bool = False


def panel_of(chart: Chart, more: dict[str, str] | None = None) -> Panel:
    """A chart of the table, with the curves that Prometheus has, and `more` queries of other curves."""
    queries = {QUERIES[series.key]: series.label for series in chart.series if series.key in QUERIES}
    stacked = chart.kind is Kind.STACKED
    return Panel(chart.heading, UNITS.get(chart.unit, "short"), {**queries, **(more or {})}, stacked)


def panel_of_metrics(title: str, *keys: str) -> Panel:
    """A panel of several metrics with one unit, each with its label."""
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
        # Free slots are not ROLLOUT_IDLE, for which Prometheus would need the spans of every server.
        panel_of(
            IDLE,
            {
                "1 - sum(async_grpo_samples_running) / sum(async_grpo_concurrency_limit_samples)": "free slots of the "
                "rollout servers"
            },
        ),
        Panel("Since the last step", "s", {"time() - async_grpo_trainer_last_step_timestamp_seconds": "trainer"}),
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
        panel_of(AGES),
        Panel("How full the staleness window is", "percentunit", {"max(async_grpo_window_fill_ratio)": "window"}),
        panel_of_metrics("Off-policy: effective sample size, clipped tokens", "ess", "clip_fraction"),
    ],
    "Weights": [
        Panel(
            "Versions",
            "short",
            {"async_grpo_trainer_version": "trainer", "async_grpo_policy_version": "{{instance}}"},
        ),
        Panel("Versions behind", "short", {"async_grpo_policy_versions_behind": "{{instance}}"}),
        Panel(
            "Last weight update of a server",
            "s",
            {
                "async_grpo_weight_transfer_seconds": "transfer, {{instance}}",
                "async_grpo_weight_pause_seconds": "pause, {{instance}}",
                "async_grpo_weight_load_seconds": "load, {{instance}}",
            },
        ),
    ],
    "Buffer": [
        panel_of(
            BUFFER,
            {'max by (state) (async_grpo_buffer_groups{state!~"inflight|ready"})': "{{state}}"},
        ),
        Panel(
            f"{RELEASED.heading}, per minute",
            "short",
            {"60 * rate(async_grpo_run_released_groups_total[5m])": "{{reason}}"},
        ),
        Panel(
            "Memory of redis",
            "bytes",
            {
                "async_grpo_run_redis_memory_bytes": "used",
                "async_grpo_run_redis_memory_limit_bytes": "limit",
                "async_grpo_run_stored_bytes": "finished groups of this run",
            },
        ),
    ],
    "Rewards": [
        panel_of_metrics(f"{REWARD.heading} of the last step", "reward_mean", "reward_std"),
        panel_of(REWARD_BY_FUNCTION, {"async_grpo_trainer_reward_by_function": "{{function}}"}),
        panel_of_metrics("Shares of the last step", "informative_groups", "truncated_fraction"),
        panel_of(METRIC_CHARTS["completion_tokens_mean"]),
        panel_of_metrics("Loss and gradient norm", "loss", "grad_norm"),
        panel_of_metrics("Nats per token", "entropy_estimate", "logprob_gap_mean", "kl"),
    ],
    "Faults": [
        Panel("Who answers", "short", {'up{job=~"trainer|rollout"}': "{{job}} {{instance}}"}),
        Panel(
            "Started again, and skipped steps",
            "short",
            {
                "max(async_grpo_trainer_epoch) - 1": "trainer",
                "async_grpo_trainer_skipped_steps_total": "skipped steps",
            },
        ),
        Panel(
            "Lost, per minute",
            "short",
            {
                "60 * sum(rate(async_grpo_leases_lost_total[5m]))": "leases",
                '60 * sum by (outcome) (rate(async_grpo_groups_total{outcome!="inserted"}[5m]))': "groups: {{outcome}}",
                "60 * sum by (kind) (rate(async_grpo_reward_failures_total[5m]))": "rewards: {{kind}}",
            },
        ),
        Panel(
            "Disk of the run folder",
            "bytes",
            {"async_grpo_trainer_disk_free_bytes": "free", "async_grpo_trainer_disk_size_bytes": "size"},
        ),
        Panel(
            "Memory of the processes",
            "bytes",
            {'process_resident_memory_bytes{job=~"trainer|rollout"}': "{{job}} {{instance}}"},
        ),
        Panel("Alerts", "short", {"ALERTS": "{{alertname}}, {{alertstate}}"}),
    ],
}


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row, members in ROWS.items():
        panels.append({"type": "row", "title": row, "collapsed": False, "gridPos": _place(0, top, 24, 1), "panels": []})
        for index, panel in enumerate(members):
            place = _place(WIDTH * (index % 3), top + 1 + HEIGHT * (index // 3), WIDTH, HEIGHT)
            panels.append(_facts(panel, place))
        top += 1 + HEIGHT * -(-len(members) // 3)
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


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _facts(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "prometheus"}
    targets = [
        {"refId": chr(ord("A") + index), "datasource": source, "expr": expr, "legendFormat": legend}
        for index, (expr, legend) in enumerate(panel.queries.items())
    ]
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0 if panel.unit in ("s", "bytes") else None}
    if panel.stacked:
        defaults["custom"] = {"fillOpacity": 30, "stacking": {"mode": "normal", "group": "A"}}
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def text() -> str:
    """The text of the dashboard file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
