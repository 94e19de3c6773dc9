"""Server-sent events: which files of a run, or which runs, have changed.

    look, LOOK_S later look again  -->  what differs  -->  event: rows | runs, with the names as JSON

A page asks for one of these streams and fetches what it shows again when it is named there.
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

LOOK_S = 0.5
"""Seconds between two looks."""
QUIET_LOOKS = 30
"""Looks without news after which the connection is shown to be alive."""
WRITTEN = (
    *("metrics.jsonl", "trained.jsonl", "samples/*.jsonl", "timeline/*.jsonl", "evaluations/*.jsonl", "logs/*.log"),
    *("run.json", "summary.json", "report.md"),
)
"""Files whose growth is news."""


def news_of(run_dir: Path, ending: asyncio.Event) -> AsyncIterator[str]:
    """Events `rows` with the names of the run's files that have grown, and `run.lock` when it began or ended."""
    return _changes("rows", lambda: sizes_of(run_dir), ending)


def news_of_runs(root: RunsRoot, ending: asyncio.Event) -> AsyncIterator[str]:
    """Events `runs` with the ids of the runs that have changed, come or gone."""
    return _changes("runs", lambda: {run.id: run.sign() for run in root.runs()}, ending)


async def _changes(event: str, look: Callable[[], Mapping[str, Any]], ending: asyncio.Event) -> AsyncIterator[str]:
    """An event for each difference between two looks, until `ending` is set."""
    known, quiet = await asyncio.to_thread(look), 0
    yield "retry: 2000\n\n"
    while not ending.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ending.wait(), LOOK_S)
        now = await asyncio.to_thread(look)
        changed = sorted(name for name in now.keys() | known.keys() if now.get(name) != known.get(name))
        known, quiet = now, 0 if changed else quiet + 1
        if changed:
            yield f"event: {event}\ndata: {json.dumps(changed)}\n\n"
        elif quiet % QUIET_LOOKS == 0:
            yield ": quiet\n\n"


def sizes_of(run_dir: Path) -> dict[str, int]:
    """Size of each file that is written while a run goes on; of its lock, whether it is held."""
    found = [path for pattern in WRITTEN for path in run_dir.glob(pattern)]
    sizes = {str(path.relative_to(run_dir)): path.stat().st_size for path in found}
    return {**sizes, "run.lock": int(RunFolder(run_dir).is_at_work())}
