"""A run's timeline at screen resolution.

    timeline/ROLE.jsonl --RunTimeline--> Track (sorted, on lanes) --render_range--> at most one span per pixel

Spans shorter than a pixel are merged, tracks with many lanes become a density, and each range has the shares of its
kinds of spans. Times in queries and answers are seconds since the run's first event.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from async_grpo.lab.view.columns import READ_S
from async_grpo.lab.view.followed import FollowedFiles
from async_grpo.lab.view.recent_runs import RecentRuns
from async_grpo.lab.view.sample_index import NameTable
from async_grpo.telemetry.idle import GENERATING, Span, busy_share, merged
from async_grpo.telemetry.timeline import (
    CPU_TRACK,
    PROCESS_TRACK,
    START,
    STARTED,
    TRACK,
    WAIT,
    lane_numbers,
    role_order,
)

MANY_LANES = 6
"""Tracks with more lanes are shown as a density unless the query expands them."""
SORT_EVERY_S = 1.0
FAST_EVENTS = 10_000
"""A track of FAST_EVENTS or more is sorted at most every SORT_EVERY_S seconds or 4 times the last sort's duration."""
WEIGHTS = "weights"
MAX_LANES = 16
"""Tracks with more lanes merge their spans into proportionally longer pieces, which keeps the answer small."""

Floats = npt.NDArray[np.float64]


class _Event(msgspec.Struct):
    role: str
    track: str
    name: str
    start_s: float
    end_s: float | None = None
    args: msgspec.Raw = msgspec.Raw(b"")


class TimelineQuery(BaseModel):
    """The range of a timeline to show; the whole timeline without `start` and `end`."""

    model_config = ConfigDict(extra="forbid")

    start: float | None = None
    end: float | None = None
    pixels: int = Field(default=1000, ge=50, le=5000)
    expand: list[str] = Field(default=[], max_length=100)
    """ROLE/TRACK of the tracks whose lanes are shown even if there are many."""


class Track:
    """The spans of one track of a role."""

    def __init__(self) -> None:
        # All events, in the order of the file.
        self._start = array("d")
        self._end = array("d")
        self._names: list[str] = []
        self._kinds = NameTable()
        self._kind = array("i")
        self._args: list[bytes] = []

        # The events of the last sort, by lane and start. `order` has their indices in the columns above.
        self._sorted_count = 0
        self._sorted_at_s = 0.0
        self._sort_took_s = 0.0
        self.order: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.start: Floats = np.zeros(0)
        self.end: Floats = np.zeros(0)
        self.lane: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.kind: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.lanes = 0

    def add_event(self, event: _Event) -> None:
        """Add a row of the timeline."""
        self._start.append(event.start_s)
        self._end.append(event.start_s if event.end_s is None else max(event.start_s, event.end_s))
        self._names.append(event.name)
        self._kind.append(self._kinds.add(span_kind(event.name)))
        self._args.append(bytes(event.args))

    def sort_events(self) -> None:
        """Sort the events by lane and start, unless the last sort is too recent (SORT_EVERY_S)."""
        if not self.has_unsorted_events:
            return
        now = time.monotonic()
        wait_s = max(SORT_EVERY_S, 4 * self._sort_took_s)
        if self._sorted_count >= FAST_EVENTS and now - self._sorted_at_s < wait_s:
            return

        start = np.array(self._start)
        end = np.array(self._end)
        by_start = np.argsort(start, kind="stable")
        spans = zip(start[by_start].tolist(), end[by_start].tolist(), strict=True)
        lane = np.array(lane_numbers(spans), np.int64)
        by_lane = np.argsort(lane, kind="stable")
        self.order = by_start[by_lane]
        self.lane = lane[by_lane]
        self.start = start[self.order]
        self.end = end[self.order]
        self.kind = np.array(self._kind)[self.order]
        self.lanes = int(lane.max()) + 1
        self._sorted_count = len(start)
        self._sorted_at_s = time.monotonic()
        self._sort_took_s = self._sorted_at_s - now

    @property
    def has_unsorted_events(self) -> bool:
        """True if some events are not sorted yet."""
        return self._sorted_count < len(self._start)

    def visible_spans(self, from_s: float, to_s: float, pixel_s: float) -> list[list[Any]]:
        """Return the visible spans: [lane, start, end, name, count, kind, args].

        Spans shorter than a pixel that start in the same pixel are merged: `count` is their number, `kind` the one that
        took the most time, and `args` is None.
        """
        visible = np.flatnonzero((self.end >= from_s) & (self.start <= to_s))
        if not len(visible):
            return []
        start = self.start[visible]
        end = self.end[visible]
        lane = self.lane[visible]
        kind = self.kind[visible]

        # A span starts a new piece unless it and its predecessor are short and start in the same pixel of a lane.
        pixel = np.floor((start - from_s) / pixel_s)
        is_short = end - start < pixel_s
        is_separate = ~(is_short[1:] & is_short[:-1]) | (pixel[1:] != pixel[:-1]) | (lane[1:] != lane[:-1])
        first = np.flatnonzero(np.concatenate([[True], is_separate]))
        counts = np.diff(np.append(first, len(visible)))
        last_end = np.maximum.reduceat(end, first)
        kinds = range(kind.max() + 1)
        seconds = [np.add.reduceat(np.where(kind == number, end - start, 0.0), first) for number in kinds]
        main_kind = np.argmax(seconds, axis=0)

        pieces = []
        for index, position in enumerate(first):
            label = self._label(int(visible[position]), int(counts[index]), int(main_kind[index]))
            pieces.append([int(lane[position]), float(start[position]), float(last_end[index]), *label])
        return pieces

    def _label(self, position: int, count: int, kind: int) -> list[Any]:
        """Return [name, count, kind, args] of a piece that starts with the sorted event at `position`."""
        kind_name = self._kinds.all[kind]
        if count > 1:
            return [kind_name, count, kind_name, None]
        event = int(self.order[position])
        args = self._args[event]
        return [self._names[event], count, kind_name, msgspec.json.decode(args) if args else None]

    def span_density(self, edges: Floats) -> list[float]:
        """Return the mean number of open spans in each interval between two edges."""
        starts = np.sort(self.start)
        ends = np.sort(self.end)
        open_seconds = _elapsed_sums(starts, edges) - _elapsed_sums(ends, edges)
        return [round(float(value), 3) for value in np.diff(open_seconds) / np.diff(edges)]

    def busy_shares(self, from_s: float, to_s: float) -> dict[str, float]:
        """Return kind of span -> share of the range in which at least one such span was open."""
        shares = {}
        for number, kind in enumerate(self._kinds.all):
            starts, ends = self.spans_in_range(from_s, to_s, number)
            if len(starts):
                shares[kind] = busy_share(starts, ends, from_s, to_s)
        return shares

    def waited_share(self, from_s: float, to_s: float) -> float:
        """Return the share of the range that `waited_s` of the spans adds up to. A span at an edge counts in part."""
        waited_s = 0.0
        for position in np.flatnonzero((self.end > from_s) & (self.start < to_s)):
            args = self._args[int(self.order[position])]
            start, end = float(self.start[position]), float(self.end[position])
            if args and end > start:
                inside = (min(end, to_s) - max(start, from_s)) / (end - start)
                waited_s += inside * float(msgspec.json.decode(args).get("waited_s") or 0.0)
        return waited_s / (to_s - from_s)

    def starts_of(self, kind: str) -> Floats:
        """Return the sorted starts of all spans of this kind."""
        if kind not in self._kinds.all:
            return np.zeros(0)
        return np.sort(self.start[self.kind == self._kinds.all.index(kind)])

    def spans_in_range(self, from_s: float, to_s: float, kind: int | None = None) -> tuple[Floats, Floats]:
        """Return starts and ends of the spans that overlap the range, optionally of one kind."""
        overlaps = (self.end > from_s) & (self.start < to_s)
        if kind is not None:
            overlaps &= self.kind == kind
        return self.start[overlaps], self.end[overlaps]


def span_kind(name: str) -> str:
    """Return a span's name without its number: `group 17` is a `group`."""
    return name.rstrip("0123456789").rstrip()


def _elapsed_sums(moments: Floats, times: Floats) -> Floats:
    """Return for each time the sum of the seconds since all earlier `moments`, which are sorted."""
    count = np.searchsorted(moments, times)
    return count * times - np.concatenate([[0.0], np.cumsum(moments)])[count]


class RunTimeline:
    """The timeline of one run folder. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "timeline"
        self._lock = threading.Lock()
        self._decode = msgspec.json.Decoder(_Event).decode
        self._reset()

    def _reset(self) -> None:
        self._files = FollowedFiles(self._folder, "*.jsonl")
        self._tracks: dict[str, dict[str, Track]] = {}
        self._origin_s: float | None = None
        self._end_s = 0.0

    def render_range(self, query: TimelineQuery) -> dict[str, Any]:
        """Return the rows and shares of the range, at a resolution of `pixels`."""
        with self._lock:
            read = self._read_new_events()
            origin_s = self._origin_s or 0.0
            duration_s = max(0.0, self._end_s - origin_s)
            from_s = origin_s + (0.0 if query.start is None else query.start)
            to_s = origin_s + (duration_s if query.end is None else query.end)
            to_s = max(from_s + 1e-6, to_s)

            rows = []
            is_behind = read < 1
            for role, name, track in self._sorted_tracks():
                rows.append(self._make_row(role, name, track, from_s, to_s, query))
                is_behind = is_behind or track.has_unsorted_events
            return {
                "origin_s": origin_s,
                "whole": duration_s,
                "start": from_s - origin_s,
                "end": to_s - origin_s,
                "rows": rows,
                "read": read,
                "behind": is_behind,
                "shares": self._make_shares(from_s, to_s),
                "outages": [
                    {"role": role, "start": start - origin_s, "end": end - origin_s}
                    for role, tracks in self._tracks.items()
                    for start, end in _find_outages(tracks)
                ],
            }

    def _make_row(self, role: str, name: str, track: Track, from_s: float, to_s: float, query: TimelineQuery) -> Any:
        row = {"role": role, "track": name, "lanes": track.lanes, "weights": name == WEIGHTS, "waits": name == WAIT}
        if track.lanes > MANY_LANES and f"{role}/{name}" not in query.expand:
            return {**row, "density": track.span_density(np.linspace(from_s, to_s, query.pixels + 1))}

        origin_s = self._origin_s or 0.0
        pixel_s = (to_s - from_s) / query.pixels * max(1.0, track.lanes / MAX_LANES)
        spans = []
        for lane, start_s, end_s, *label in track.visible_spans(from_s, to_s, pixel_s):
            spans.append([lane, round(start_s - origin_s, 6), round(end_s - origin_s, 6), *label])
        return {**row, "spans": spans}

    def _make_shares(self, from_s: float, to_s: float) -> list[dict[str, Any]]:
        """Return per role the share of the range that each kind of span took, and the role's idle share."""
        shares = []
        for role in sorted(self._tracks, key=role_order):
            tracks = self._tracks[role]
            parts = []
            for name, track in tracks.items():
                # A span of this track is a measurement of `waited_s`, so its own length means nothing.
                if name == CPU_TRACK:
                    parts.append({"track": name, "kind": name, "share": track.waited_share(from_s, to_s)})
                    continue
                for kind, share in track.busy_shares(from_s, to_s).items():
                    parts.append({"track": name, "kind": kind, "share": share})
            shares.append({"role": role, "parts": parts, "idle": _idle_share(tracks, from_s, to_s)})
        return shares

    def _sorted_tracks(self) -> Iterator[tuple[str, str, Track]]:
        """Yield (role, name, track) of all tracks in the order of the screen, their events sorted."""
        for role in sorted(self._tracks, key=role_order):
            for name, track in self._tracks[role].items():
                track.sort_events()
                yield role, name, track

    def _read_new_events(self) -> float:
        """Read new events for READ_S seconds, from the start if another run has replaced a file.

        Returns the share that has been read.
        """
        if self._files.are_replaced():
            self._reset()
        return self._files.read_lines(self._add_lines, time.monotonic() + READ_S)

    def _add_lines(self, _path: Path, _offset: int, lines: list[bytes]) -> None:
        for line in lines:
            try:
                event = self._decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
            tracks = self._tracks.setdefault(event.role, {})
            if event.track not in tracks:
                tracks[event.track] = Track()
            tracks[event.track].add_event(event)
            self._origin_s = event.start_s if self._origin_s is None else min(self._origin_s, event.start_s)
            self._end_s = max(self._end_s, event.start_s, event.end_s or 0.0)


def _find_outages(tracks: dict[str, Track]) -> list[Span]:
    """Return the intervals in which the role was away: a server until it generates again (`telemetry.idle.outages`),
    the trainer until its next process waits for its first batch."""
    if PROCESS_TRACK in tracks:
        starts = tracks[PROCESS_TRACK].starts_of(STARTED)
        back = np.sort(np.concatenate([tracks[name].start for name in GENERATING if name in tracks] or [np.zeros(0)]))
    elif TRACK in tracks:
        starts = back = tracks[TRACK].starts_of(START)
    else:
        return []

    if len(starts) < 2:
        return []  # nearly every role: sorting the ends of all its events would be for nothing

    ends = np.sort(np.concatenate([track.end for track in tracks.values()]))
    intervals = []
    for started in starts[1:]:
        # The start is an event too, so the last end must be strictly before it.
        last = int(np.searchsorted(ends, started)) - 1
        first = int(np.searchsorted(back, started))
        if last >= 0 and first < len(back):
            intervals.append((float(ends[last]), float(back[first])))
    return merged(intervals)


def _idle_share(tracks: dict[str, Track], from_s: float, to_s: float) -> float | None:
    """Return the idle share as `telemetry.idle` defines it.

    The trainer is idle while it waits for a batch (except for the first), a server while it generates nothing. None for
    other roles.
    """
    generating = [tracks[name].spans_in_range(from_s, to_s) for name in GENERATING if name in tracks]
    if generating:
        starts, ends = zip(*generating, strict=True)
        return 1.0 - busy_share(np.concatenate(starts), np.concatenate(ends), from_s, to_s)
    if TRACK in tracks:
        return tracks[TRACK].busy_shares(from_s, to_s).get(WAIT, 0.0)
    return None


def timeline_routes(find_run: Callable[[str], Path]) -> APIRouter:
    """Return the route of timelines. `find_run` returns the folder of a run's id, or raises HTTPException."""
    routes = APIRouter()
    runs = RecentRuns(RunTimeline)

    @routes.get("/api/runs/{name}/timeline")
    def timeline(name: str, query: Annotated[TimelineQuery, Query()]) -> dict[str, Any]:
        """Return the timeline of a range."""
        return runs.get_run(find_run(name)).render_range(query)

    return routes
