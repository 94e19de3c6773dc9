"""Timeline of all processes, in a file that Perfetto opens (https://ui.perfetto.dev).

    role --Timeline--> timeline/<role>.jsonl --merge_timelines--> timeline.json

The trace has one process per role and one thread per track. Overlapping spans of a track (groups that are generated in
parallel) are put on separate lanes, because a trace viewer would otherwise show one as nested in the other.

`PhaseTimer` measures the phases of a step: named durations, and on rank zero also spans of the timeline.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from async_grpo.telemetry.jsonl import JsonLines, read_rows
from async_grpo.utils.files import write_atomic

Event = dict[str, Any]

TRACK = "trainer"
CPU_TRACK = "cpu"
PROCESS_TRACK = "process"
STARTED = "started"
"""Instant on PROCESS_TRACK: start of a rollout server's process. The server was away between the last row of its
previous process and this instant (`idle.outages`)."""
ENGINE_NOTE = "engine"
"""Instant on PROCESS_TRACK, with `note`: reason why a server's engine does not run as configured."""
START = "start"
"""Span of waiting for the first batch of a process, while engines load."""
WAIT = "wait"
"""Span of waiting for a later batch."""
_FIRST_ROLES = ("supervisor", "trainer", "publisher")


class Timeline:
    """Spans and instants of one role; times are `time.time()` seconds."""

    def __init__(self, path: Path, role: str) -> None:
        self._lines = JsonLines(path)
        self._role = role

    def span(self, track: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """Record that `name` lasted from `start_s` to `end_s`."""
        self._write({"track": track, "name": name, "start_s": start_s, "end_s": end_s}, args)

    def instant(self, track: str, name: str, at_s: float, **args: Any) -> None:
        """Record that `name` happened at `at_s`."""
        self._write({"track": track, "name": name, "start_s": at_s}, args)

    def close(self) -> None:
        """Close the file; idempotent."""
        self._lines.close()

    def _write(self, row: Event, args: dict[str, Any]) -> None:
        self._lines.write({"role": self._role, **row, **({"args": args} if args else {})})


def merge_timelines(run_dir: Path) -> Path:
    """Merge run_dir/timeline/*.jsonl into run_dir/timeline.json, in Chrome's trace-event format.

    Times are microseconds since the first event of the run. The file is replaced atomically.
    """
    rows: list[Event] = []
    for path in sorted((run_dir / "timeline").glob("*.jsonl")):
        rows += _read_valid_rows(path)
    origin_s = min((row["start_s"] for row in rows), default=0.0)
    by_role: dict[str, list[Event]] = {}
    for row in rows:
        by_role.setdefault(row["role"], []).append(row)
    events: list[Event] = []
    for pid, role in enumerate(sorted(by_role, key=role_order), start=1):
        events.append(_metadata("process_name", pid, 0, name=role))
        events.append(_metadata("process_sort_index", pid, 0, sort_index=pid))
        events += _role_events(pid, by_role[role], origin_s)
    return write_atomic(run_dir / "timeline.json", json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _read_valid_rows(path: Path) -> Iterator[Event]:
    """Yield the rows with all fields of an event."""
    for row in read_rows(path):
        has_names = all(isinstance(row.get(key), str) for key in ("role", "track", "name"))
        has_start = isinstance(row.get("start_s"), (int, float))
        has_valid_end = isinstance(row.get("end_s", 0.0), (int, float))
        if has_names and has_start and has_valid_end:
            yield row


def role_order(role: str) -> tuple[int, str]:
    """Return the sort key of a role: supervisor, trainer and publisher first, then by name."""
    rank = _FIRST_ROLES.index(role) if role in _FIRST_ROLES else len(_FIRST_ROLES)
    return rank, role


def _role_events(pid: int, rows: Iterable[Event], origin_s: float) -> list[Event]:
    """Return the events of one role. Threads are numbered by track (in order of appearance) and lane."""
    by_track: dict[str, list[Event]] = {}
    for row in rows:
        by_track.setdefault(row["track"], []).append(row)
    events: list[Event] = []
    tid = 0
    for track, track_rows in by_track.items():
        lanes = _lanes([_event(row, origin_s) for row in track_rows])
        for number, lane in enumerate(lanes, start=1):
            tid += 1
            label = track if number == 1 else f"{track} ({number})"
            events.append(_metadata("thread_name", pid, tid, name=label))
            events.append(_metadata("thread_sort_index", pid, tid, sort_index=tid))
            events += [{**event, "pid": pid, "tid": tid} for event in lane]
    return events


def _lanes(events: list[Event]) -> list[list[Event]]:
    """Distribute the events over the fewest lanes without overlaps; instants stay on the first lane."""
    spans = sorted((event for event in events if event["ph"] == "X"), key=lambda event: int(event["ts"]))
    numbers = lane_numbers((event["ts"], event["ts"] + event["dur"]) for event in spans)
    lanes: list[list[Event]] = [[] for _ in range(max(numbers, default=0) + 1)]
    for number, event in zip(numbers, spans, strict=True):
        lanes[number].append(event)
    instants = [event for event in events if event["ph"] == "i"]
    lanes[0] = sorted([*lanes[0], *instants], key=lambda event: int(event["ts"]))
    return lanes


def lane_numbers(spans: Iterable[tuple[float, float]]) -> list[int]:
    """Return the lowest free lane for each (start, end). Spans must be sorted by start."""
    numbers: list[int] = []
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    for start, end in spans:
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        number = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, number))
        numbers.append(number)
    return numbers


def _event(row: Event, origin_s: float) -> Event:
    """Convert a row to a complete ("X") or instant ("i") event, in whole microseconds."""
    start_us = round((row["start_s"] - origin_s) * 1e6)
    event: Event = {"name": row["name"], "cat": row["track"], "ts": start_us, "args": row.get("args", {})}
    if "end_s" not in row:
        return {**event, "ph": "i", "s": "t"}
    end_us = round((row["end_s"] - origin_s) * 1e6)
    return {**event, "ph": "X", "dur": max(0, end_us - start_us)}


def _metadata(key: str, pid: int, tid: int, **args: Any) -> Event:
    return {"name": key, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}


class PhaseTimer:
    """Collects the durations of one step. `timeline` is None on ranks other than zero, which write nothing."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        self._timeline = timeline
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def span(self, name: str, **args: object) -> Iterator[None]:
        """Measure the duration of the block. Blocks of the same name add up."""
        start_s = time.time()
        started = time.perf_counter()
        try:
            yield
        finally:
            elapsed_s = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed_s
            if self._timeline is not None:
                self._timeline.span(TRACK, name, start_s, start_s + elapsed_s, **args)

    def reset(self) -> None:
        """Clear the durations, at the start of a step."""
        self.seconds.clear()
