"""What a step spends its time on: named durations, and spans of the timeline on the leading rank."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from async_grpo.telemetry.timeline import Timeline

TRACK = "trainer"
START, WAIT = "start", "wait"
"""Waiting for a batch: the first one of a process, while engines load; and every later one."""


class Phases:
    """Collects the durations of one step; `timeline` is None on ranks that write nothing."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        self._timeline = timeline
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def span(self, name: str, **args: object) -> Iterator[None]:
        """Time the block; blocks of the same name add up."""
        start_s, started = time.time(), time.perf_counter()
        try:
            yield
        finally:
            elapsed_s = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed_s
            if self._timeline is not None:
                self._timeline.span(TRACK, name, start_s, start_s + elapsed_s, **args)

    def reset(self) -> None:
        """A new step begins."""
        self.seconds.clear()
