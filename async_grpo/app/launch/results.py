"""Results of a run: summary.json, report.md with its plots, timeline.json, and the headline in the terminal."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from async_grpo.app.launch.run_folder import RunFolder, RunState
from async_grpo.app.launch.state_plane import StatePlane
from async_grpo.app.report.run_report import write_report
from async_grpo.app.report.summary import describe_learning, summarize
from async_grpo.telemetry.jsonl import read_rows
from async_grpo.telemetry.rows import RESTARTS_PREFIX, rows_of_kind
from async_grpo.telemetry.timeline import merge_timelines
from async_grpo.telemetry.trackers import make_trackers


async def write_results(plane: StatePlane, folder: RunFolder, state: RunState) -> dict[str, Any]:
    """Write summary.json, report.md with its plots, and timeline.json. Returns the summary. Idempotent."""
    stats = await plane.buffer.stats()
    rows = read_rows(folder.path / "metrics.jsonl")
    restarts = {f"{RESTARTS_PREFIX}{role}": count for role, count in state.restarts.items()}
    evaluations = await plane.board.evaluations()
    summary = summarize(
        plane.config,
        rows_of_kind(rows, "step"),
        rows_of_kind(rows, "probe"),
        evaluations,
        {**asdict(stats), "active": stats.active},
        {**await plane.board.counters(), **restarts},
        state.wall_s,
        prepare_s=state.prepare_s,
        servers=[read_rows(path) for path in sorted((folder.path / "timeline").glob("rollout-*.jsonl"))],
        given_up=state.given_up,
    )
    trackers = make_trackers(plane.config)
    for evaluation in evaluations:
        trackers.log_evaluation(evaluation)
    await asyncio.to_thread(merge_timelines, folder.path)
    trackers.attach_files([await asyncio.to_thread(write_report, folder.path, summary)])
    await asyncio.to_thread(trackers.close)
    return summary


def format_headline(summary: dict[str, Any], folder: RunFolder) -> str:
    """Return the result of a run in a few lines."""
    report = f"report: {folder.path / 'report.md'}"
    if not summary["steps"]:
        return f"nothing was trained: no step was finished\n{report}"

    tokens = f"{summary['generated_tokens']} generated, {summary['trained_tokens']} trained"
    groups = ", ".join(f"{reason} {count}" for reason, count in summary["groups"].items() if count)
    lines = [
        f"steps {summary['steps']}, tokens: {tokens}",
        describe_learning(summary),
        summary["bottleneck"],
        f"age of trained tokens: max {summary['max_age']} (bound {summary['age_bound']})",
        f"groups: {groups}; balanced: {'yes' if summary['balanced'] else 'NO'}",
    ]
    if summary["given_up"]:
        lines.append(f"continued without {', '.join(summary['given_up'])}: see the report for the reason")
    if summary["engine_notes"]:
        lines.append(f"without captured graphs: {', '.join(summary['engine_notes'])}; see the report for the reason")
    lines.append(report)
    return "\n".join(line for line in lines if line)
