"""What is left of a run: summary.json, report.md with its plots, timeline.json."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Any

from async_grpo.launch.run_folder import RunFolder, RunState
from async_grpo.launch.state_plane import StatePlane
from async_grpo.telemetry.jsonl import read_rows
from async_grpo.telemetry.report import write_report
from async_grpo.telemetry.rows import RESTARTS_PREFIX, of_kind
from async_grpo.telemetry.summary import summarize
from async_grpo.telemetry.timeline import merge_timelines
from buffer import BufferStats


async def write_results(plane: StatePlane, folder: RunFolder, state: RunState, stats: BufferStats) -> dict[str, Any]:
    """Write all three; returns the summary. Safe to repeat."""
    rows = read_rows(folder.path / "metrics.jsonl")
    restarts = {f"{RESTARTS_PREFIX}{role}": count for role, count in state.restarts.items()}
    summary = summarize(
        plane.config,
        of_kind(rows, "step"),
        of_kind(rows, "probe"),
        await plane.board.evaluations(),
        {**asdict(stats), "active": stats.active},
        {**await plane.board.counters(), **restarts},
        state.wall_s,
    )
    (folder.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    await asyncio.to_thread(merge_timelines, folder.path)
    await asyncio.to_thread(write_report, folder.path, summary)
    return summary
