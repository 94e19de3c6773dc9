"""dashboards/async-grpo.json from the table below: python deploy/grafana/make_dashboard.py

A test holds file and table together, and runs every query against a Prometheus that scrapes a run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "dashboards" / "async-grpo.json"
WIDTH, HEIGHT = 8, 7
"""Size of a panel; a row of Grafana has 24 columns."""

Panel = tuple[str, str, dict[str, str]]
"""Title, unit as Grafana calls it, and query -> legend."""

TRAINER_TIME = "async_grpo_trainer_phase_seconds_total"

ROWS: dict[str, list[Panel]] = {
    "Throughput and idle": [
        (
            "Optimizer steps",
            "short",
            {"async_grpo_trainer_version": "trained", "async_grpo_trainer_target_version": "target"},
        ),
        (
            "Tokens per second",
            "short",
            {
                "sum(rate(async_grpo_generated_tokens_total[5m]))": "generated",
                "sum(rate(async_grpo_trainer_trained_tokens_total[5m]))": "trained",
            },
        ),
        ("Seconds of the trainer by phase, per second", "percentunit", {f"rate({TRAINER_TIME}[5m])": "{{phase}}"}),
        (
            "Idle: waits of the trainer, free slots of the servers",
            "percentunit",
            {
                f'sum(rate({TRAINER_TIME}{{phase="wait"}}[5m])) / sum(rate({TRAINER_TIME}[5m]))': "trainer",
                "1 - sum(async_grpo_samples_running) / sum(async_grpo_concurrency_limit_samples)": "rollout",
            },
        ),
        ("Since the last step", "s", {"time() - async_grpo_trainer_last_step_timestamp_seconds": "trainer"}),
        (
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
        (
            "Age of trained tokens, in steps",
            "short",
            {
                "async_grpo_trainer_age_mean_steps": "mean",
                "async_grpo_trainer_age_max_steps": "max",
                "async_grpo_trainer_age_bound_steps": "bound",
            },
        ),
        ("How full the staleness window is", "percentunit", {"max(async_grpo_window_fill_ratio)": "window"}),
        (
            "Off-policy: effective sample size, clipped tokens",
            "percentunit",
            {"async_grpo_trainer_ess": "ESS", "async_grpo_trainer_clip_fraction": "clipped"},
        ),
    ],
    "Weights": [
        (
            "Versions",
            "short",
            {"async_grpo_trainer_version": "trainer", "async_grpo_policy_version": "{{instance}}"},
        ),
        ("Versions behind", "short", {"async_grpo_policy_versions_behind": "{{instance}}"}),
        (
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
        ("Groups by state", "short", {"max by (state) (async_grpo_buffer_groups)": "{{state}}"}),
        (
            "Groups released, per minute",
            "short",
            {"60 * rate(async_grpo_run_released_groups_total[5m])": "{{reason}}"},
        ),
        (
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
        (
            "Reward of the last step",
            "short",
            {"async_grpo_trainer_reward_mean": "mean", "async_grpo_trainer_reward_std": "deviation"},
        ),
        ("By function", "short", {"async_grpo_trainer_reward_by_function": "{{function}}"}),
        (
            "Shares of the last step",
            "percentunit",
            {
                "async_grpo_trainer_informative_groups": "groups whose rewards differ",
                "async_grpo_trainer_truncated_fraction": "truncated completions",
            },
        ),
        ("Completion length, in tokens", "short", {"async_grpo_trainer_completion_tokens_mean": "mean"}),
        (
            "Loss and gradient norm",
            "short",
            {"async_grpo_trainer_loss": "loss", "async_grpo_trainer_grad_norm": "gradient norm"},
        ),
        (
            "Nats per token",
            "short",
            {
                "async_grpo_trainer_entropy_estimate": "entropy, estimated",
                "async_grpo_trainer_logprob_gap_mean": "log-probability gap, mean",
                "async_grpo_trainer_kl": "KL from the reference",
            },
        ),
    ],
    "Faults": [
        ("Who answers", "short", {'up{job=~"trainer|rollout"}': "{{job}} {{instance}}"}),
        (
            "Started again, and skipped steps",
            "short",
            {
                "max(async_grpo_trainer_epoch) - 1": "trainer",
                "async_grpo_trainer_skipped_steps_total": "skipped steps",
            },
        ),
        (
            "Lost, per minute",
            "short",
            {
                "60 * sum(rate(async_grpo_leases_lost_total[5m]))": "leases",
                '60 * sum by (outcome) (rate(async_grpo_groups_total{outcome!="inserted"}[5m]))': "groups: {{outcome}}",
                "60 * sum by (kind) (rate(async_grpo_reward_failures_total[5m]))": "rewards: {{kind}}",
            },
        ),
        (
            "Disk of the run folder",
            "bytes",
            {"async_grpo_trainer_disk_free_bytes": "free", "async_grpo_trainer_disk_size_bytes": "size"},
        ),
        (
            "Memory of the processes",
            "bytes",
            {'process_resident_memory_bytes{job=~"trainer|rollout"}': "{{job}} {{instance}}"},
        ),
        ("Alerts", "short", {"ALERTS": "{{alertname}}, {{alertstate}}"}),
    ],
}


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row, members in ROWS.items():
        panels.append({"type": "row", "title": row, "collapsed": False, "gridPos": _place(0, top, 24, 1), "panels": []})
        for index, (title, unit, queries) in enumerate(members):
            place = _place(WIDTH * (index % 3), top + 1 + HEIGHT * (index // 3), WIDTH, HEIGHT)
            panels.append(_panel(title, unit, queries, place))
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


def _panel(title: str, unit: str, queries: dict[str, str], place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "prometheus"}
    targets = [
        {"refId": chr(ord("A") + index), "datasource": source, "expr": expr, "legendFormat": legend}
        for index, (expr, legend) in enumerate(queries.items())
    ]
    return {
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0 if unit in ("s", "bytes") else None}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def text() -> str:
    """The text of the dashboard file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
