"""When each process did what, in a file that Perfetto opens (https://ui.perfetto.dev).

    role --Timeline--> timeline/<role>.jsonl --merge_timelines--> timeline.json

The trace has one process per role and one thread per track. Spans of a track that overlap (groups generated side by
side) go to further lanes of that track, because a trace viewer would otherwise show one as a part of the other.

`PhaseTimer` measures what a step spends its time on: named durations, and spans of the timeline on the leading rank.
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

TRACK, CPU_TRACK, PROCESS_TRACK = "trainer", "cpu", "process"
STARTED = "started"
"""Instant on PROCESS_TRACK: a rollout server's process began. Between it and what the one before wrote last, the server
was away (`idle.outages`)."""
ENGINE_NOTE = "engine"
"""Instant on PROCESS_TRACK, with `note`: why a server's engine does not run as configured."""
START, WAIT = "start", "wait"
"""Spans of waiting for a batch: `start` for the first batch of a process, while engines load; `wait` for later ones."""
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
    rows = [row for path in sorted((run_dir / "timeline").glob("*.jsonl")) for row in _usable(path)]
    origin_s = min((row["start_s"] for row in rows), default=0.0)
    by_role: dict[str, list[Event]] = {}
    for row in rows:
        by_role.setdefault(row["role"], []).append(row)
    events: list[Event] = []
    for pid, role in enumerate(sorted(by_role, key=role_order), start=1):
        events += [_metadata("process_name", pid, 0, name=role)]
        events += [_metadata("process_sort_index", pid, 0, sort_index=pid)]
        events += _role_events(pid, by_role[role], origin_s)
    return write_atomic(run_dir / "timeline.json", json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _usable(path: Path) -> Iterator[Event]:
    """The rows that have everything that an event needs."""
    for row in read_rows(path):
        known = all(isinstance(row.get(key), str) for key in ("role", "track", "name"))
        timed = isinstance(row.get("start_s"), (int, float))
        ended = isinstance(row.get("end_s", 0.0), (int, float))
        if known and timed and ended:
            yield row


def role_order(role: str) -> tuple[int, str]:
    """Sort key of roles: the trainer's side first, then by name."""
    rank = _FIRST_ROLES.index(role) if role in _FIRST_ROLES else len(_FIRST_ROLES)
    return rank, role


def _role_events(pid: int, rows: Iterable[Event], origin_s: float) -> list[Event]:
    """The events of one role, its threads numbered by track (in order of appearance) and lane."""
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
    """Put the events on as few lanes as hold them without overlap; instants stay on the first."""
    spans = sorted((event for event in events if event["ph"] == "X"), key=lambda event: int(event["ts"]))
    numbers = lane_numbers((event["ts"], event["ts"] + event["dur"]) for event in spans)
    lanes: list[list[Event]] = [[] for _ in range(max(numbers, default=0) + 1)]
    for number, event in zip(numbers, spans, strict=True):
        lanes[number].append(event)
    instants = [event for event in events if event["ph"] == "i"]
    lanes[0] = sorted([*lanes[0], *instants], key=lambda event: int(event["ts"]))
    return lanes


def lane_numbers(spans: Iterable[tuple[float, float]]) -> list[int]:
    """The lowest free lane for each (start, end); spans must be sorted by start."""
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
    """One row as a complete ("X") or instant ("i") event, in whole microseconds."""
    start_us = round((row["start_s"] - origin_s) * 1e6)
    event: Event = {"name": row["name"], "cat": row["track"], "ts": start_us, "args": row.get("args", {})}
    if "end_s" not in row:
        return {**event, "ph": "i", "s": "t"}
    end_us = round((row["end_s"] - origin_s) * 1e6)
    return {**event, "ph": "X", "dur": max(0, end_us - start_us)}


def _metadata(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}


class PhaseTimer:
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
        """Clear the durations: a new step begins."""
        self.seconds.clear()
