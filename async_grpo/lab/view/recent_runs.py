"""RecentRuns: what the page has read of the runs that were looked at last."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

KEPT_RUNS = 8
"""Runs whose index stays in memory."""
R = TypeVar("R")


class RecentRuns(Generic[R]):
    """One R for each run folder, made when it is first asked for. Beyond KEPT_RUNS, the least recently used one is
    dropped. Thread-safe: the page sends several requests for one run at once."""

    def __init__(self, make: Callable[[Path], R]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._runs: dict[Path, R] = {}

    def get_run(self, path: Path) -> R:
        """The one of this folder."""
        with self._lock:
            run = self._runs.pop(path) if path in self._runs else self._make(path)
            self._runs[path] = run
            if len(self._runs) > KEPT_RUNS:
                del self._runs[next(iter(self._runs))]
            return run
