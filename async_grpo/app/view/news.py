"""Server-sent events: which files of a run, or which runs, have changed.

    poll every POLL_S seconds  -->  what has changed  -->  event: rows | runs, with the names as JSON

A page subscribes to one of these streams and fetches its data again when an event names them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from async_grpo.app.launch.run_folder import RunFolder
from async_grpo.app.view.catalog import RunsRoot

POLL_S = 0.5
"""Seconds between two polls of the files."""
KEEPALIVE_POLLS = 30
"""Polls without a change after which a comment is sent, so that proxies keep the connection open."""
WRITTEN = (
    *("metrics.jsonl", "trained.jsonl", "samples/*.jsonl", "timeline/*.jsonl", "evaluations/*.jsonl", "logs/*.log"),
    *("run.json", "summary.json", "report.md"),
)
"""Files whose growth is reported."""


def news_of(run_dir: Path, ending: asyncio.Event) -> AsyncIterator[str]:
    """Events `rows` with the names of the run's files that have grown, and `run.lock` when it began or ended."""
    return _changes("rows", lambda: sizes_of(run_dir), ending)


def news_of_runs(root: RunsRoot, ending: asyncio.Event) -> AsyncIterator[str]:
    """Events `runs` with the ids of the runs that have changed, come or gone."""
    return _changes("runs", lambda: {run.id: run.sign() for run in root.runs()}, ending)


async def _changes(event: str, poll: Callable[[], Mapping[str, Any]], ending: asyncio.Event) -> AsyncIterator[str]:
    """An event whenever two successive polls differ, until `ending` is set. `poll` returns the state by name."""
    known, quiet = await asyncio.to_thread(poll), 0
    yield "retry: 2000\n\n"
    while not ending.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ending.wait(), POLL_S)
        now = await asyncio.to_thread(poll)
        changed = sorted(name for name in now.keys() | known.keys() if now.get(name) != known.get(name))
        known, quiet = now, 0 if changed else quiet + 1
        if changed:
            yield f"event: {event}\ndata: {json.dumps(changed)}\n\n"
        elif quiet % KEEPALIVE_POLLS == 0:
            yield ": quiet\n\n"


def sizes_of(run_dir: Path) -> dict[str, int]:
    """Size of each file that a live run writes, and 1 for `run.lock` while it is held, else 0."""
    found = [path for pattern in WRITTEN for path in run_dir.glob(pattern)]
    sizes = {str(path.relative_to(run_dir)): path.stat().st_size for path in found}
    return {**sizes, "run.lock": int(RunFolder(run_dir).is_at_work())}
