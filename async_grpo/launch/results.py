"""What is left of a run: summary.json, report.md with its plots, timeline.json."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from async_grpo.config import RunConfig
from async_grpo.launch.run_folder import RunFolder, RunState
from async_grpo.launch.state_plane import StatePlane
from async_grpo.telemetry.jsonl import read_rows
from async_grpo.telemetry.report import write_report
from async_grpo.telemetry.rows import RESTARTS_PREFIX, of_kind
from async_grpo.telemetry.scalars import ScalarWriter
from async_grpo.telemetry.summary import summarize
from async_grpo.telemetry.timeline import merge_timelines
from async_grpo.wire.board import Evaluation
from buffer import BufferStats


async def write_results(plane: StatePlane, folder: RunFolder, state: RunState, stats: BufferStats) -> dict[str, Any]:
    """Write all three; returns the summary. Safe to repeat."""
    rows = read_rows(folder.path / "metrics.jsonl")
    restarts = {f"{RESTARTS_PREFIX}{role}": count for role, count in state.restarts.items()}
    evaluations = await plane.board.evaluations()
    summary = summarize(
        plane.config,
        of_kind(rows, "step"),
        of_kind(rows, "probe"),
        evaluations,
        {**asdict(stats), "active": stats.active},
        {**await plane.board.counters(), **restarts},
        state.wall_s,
    )
    _write_scalars(plane.config, evaluations)
    await asyncio.to_thread(merge_timelines, folder.path)
    await asyncio.to_thread(write_report, folder.path, summary)
    return summary


def _write_scalars(config: RunConfig, evaluations: list[Evaluation]) -> None:
    """The accuracies for TensorBoard, beside the trainer's own events."""
    writer = ScalarWriter(config.run_dir, config.telemetry.tensorboard)
    for evaluation in evaluations:
        writer.write_evaluation(evaluation)
    writer.close()


def headline(summary: dict[str, Any], folder: RunFolder) -> str:
    """The end of a run in a few lines."""
    if not summary["steps"]:
        return f"nothing was trained: no step was finished\nreport: {folder.path / 'report.md'}"
    groups = ", ".join(f"{reason} {count}" for reason, count in summary["groups"].items() if count)
    lines = [
        f"steps {summary['steps']}, tokens: {summary['generated_tokens']} made, {summary['trained_tokens']} trained",
        f"held-out accuracy (sampled) {_percent(summary['accuracy_before'])} -> {_percent(summary['accuracy_after'])}",
        f"age of trained tokens: max {summary['max_age']} (bound {summary['age_bound']})",
        f"groups: {groups}; balanced: {'yes' if summary['balanced'] else 'NO'}",
        f"report: {folder.path / 'report.md'}",
    ]
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1%}"
