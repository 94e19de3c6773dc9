"""RecentRuns: a cache of the data that the page has read of the runs viewed last."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

MAX_CACHED_RUNS = 8
"""Number of runs whose data stay in memory."""
R = TypeVar("R")


class RecentRuns(Generic[R]):
    """One R per run folder, created at the first request; an LRU cache of MAX_CACHED_RUNS.

    Thread-safe: the page sends several requests for a run together, and they must get the same R.
    """

    def __init__(self, make: Callable[[Path], R]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._runs: dict[Path, R] = {}

    def get_run(self, path: Path) -> R:
        """Return the R of this folder, now the most recently used one."""
        with self._lock:
            run = self._runs.pop(path) if path in self._runs else self._make(path)
            self._runs[path] = run  # the last one in the order of insertion
            if len(self._runs) > MAX_CACHED_RUNS:
                del self._runs[next(iter(self._runs))]
            return run
