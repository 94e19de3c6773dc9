"""A run's timeline at screen resolution: spans below a pixel are merged, busy tracks become a density, and each range
has its shares.

    timeline/ROLE.jsonl --RunTimeline--> Track (sorted, on lanes) --picture(start, end, pixels)--> one span a pixel

Times in queries and answers are seconds since the run's first event.
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
from async_grpo.lab.view.sample_index import Names
from async_grpo.telemetry.idle import GENERATING, busy_share
from async_grpo.telemetry.timeline import TRACK, WAIT, lane_numbers, role_order

MANY_LANES = 6
"""Tracks with more lanes are shown as a density unless the query expands them."""
REBUILD_S, FAST_EVENTS = 1.0, 10_000
"""A track of FAST_EVENTS events or more is sorted again at most every REBUILD_S seconds, or four times as long as the
last sort took."""
WEIGHTS = "weights"
MOST_LANES = 16
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
        self._start, self._end = array("d"), array("d")
        self._names: list[str] = []
        self._kinds = Names()
        self._kind = array("i")
        self._args: list[bytes] = []
        self._built = (0, 0.0, 0.0)
        self.order: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.start: Floats = np.zeros(0)
        self.end: Floats = np.zeros(0)
        self.lane: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.kind: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.lanes = 0

    def add(self, event: _Event) -> None:
        """Add a row of the timeline."""
        self._start.append(event.start_s)
        self._end.append(event.start_s if event.end_s is None else max(event.start_s, event.end_s))
        self._names.append(event.name)
        self._kind.append(self._kinds.number(kind_of(event.name)))
        self._args.append(bytes(event.args))

    def build(self) -> None:
        """Sort the events by lane and start, unless the last sort was too recent (REBUILD_S)."""
        (count, at, took), now = self._built, time.monotonic()
        if not self.is_behind or (count >= FAST_EVENTS and now - at < max(REBUILD_S, 4 * took)):
            return
        start, end = np.array(self._start), np.array(self._end)
        by_start = np.argsort(start, kind="stable")
        lane = np.array(lane_numbers(zip(start[by_start].tolist(), end[by_start].tolist(), strict=True)), np.int64)
        by_lane = np.argsort(lane, kind="stable")
        self.order, self.lane = by_start[by_lane], lane[by_lane]
        self.start, self.end, self.kind = start[self.order], end[self.order], np.array(self._kind)[self.order]
        self.lanes = int(lane.max()) + 1
        self._built = (len(start), time.monotonic(), time.monotonic() - now)

    @property
    def is_behind(self) -> bool:
        """Whether some events are not sorted yet."""
        return self._built[0] < len(self._start)

    def spans(self, from_s: float, to_s: float, pixel_s: float) -> list[list[Any]]:
        """The visible spans: [lane, start, end, name, count, kind, args].

        Spans shorter than a pixel that begin in the same pixel are merged: `count` is their number, `kind` the one that
        took the most time, and `args` is None.
        """
        seen = np.flatnonzero((self.end >= from_s) & (self.start <= to_s))
        if not len(seen):
            return []
        start, end, lane, kind = self.start[seen], self.end[seen], self.lane[seen], self.kind[seen]
        pixel = np.floor((start - from_s) / pixel_s)
        small = end - start < pixel_s
        alone = ~(small[1:] & small[:-1]) | (pixel[1:] != pixel[:-1]) | (lane[1:] != lane[:-1])
        first = np.flatnonzero(np.concatenate([[True], alone]))
        took = [np.add.reduceat(np.where(kind == number, end - start, 0.0), first) for number in range(kind.max() + 1)]
        columns = zip(first, np.maximum.reduceat(end, first), np.diff(np.append(first, len(seen))), strict=True)
        main = np.argmax(took, axis=0)
        return [
            [int(lane[at]), float(start[at]), float(last), *self._named(int(seen[at]), int(count), int(main[place]))]
            for place, (at, last, count) in enumerate(columns)
        ]

    def _named(self, place: int, count: int, kind: int) -> list[Any]:
        event, shown = int(self.order[place]), self._kinds.all[kind]
        if count > 1:
            return [shown, count, shown, None]
        args = self._args[event]
        return [self._names[event], count, shown, msgspec.json.decode(args) if args else None]

    def density(self, edges: Floats) -> list[float]:
        """The mean number of open spans in each interval between two edges."""
        starts, ends = np.sort(self.start), np.sort(self.end)
        opened = _integral(starts, edges) - _integral(ends, edges)
        return [round(float(value), 3) for value in np.diff(opened) / np.diff(edges)]

    def busy(self, from_s: float, to_s: float) -> dict[str, float]:
        """Kind of span -> share of the range in which at least one such span was open."""
        kinds = ((kind, self.within(from_s, to_s, number)) for number, kind in enumerate(self._kinds.all))
        return {kind: busy_share(*spans, from_s, to_s) for kind, spans in kinds if len(spans[0])}

    def within(self, from_s: float, to_s: float, kind: int | None = None) -> tuple[Floats, Floats]:
        """Starts and ends of the spans (of a kind) that overlap the range."""
        seen = (self.end > from_s) & (self.start < to_s)
        if kind is not None:
            seen &= self.kind == kind
        return self.start[seen], self.end[seen]


def kind_of(name: str) -> str:
    """A span's name without its number: `group 17` is a `group`."""
    return name.rstrip("0123456789").rstrip()


def _integral(moments: Floats, at: Floats) -> Floats:
    """Sum over the sorted `moments` of the seconds from each to `at`, for each time in `at`."""
    before = np.searchsorted(moments, at)
    return before * at - np.concatenate([[0.0], np.cumsum(moments)])[before]


class RunTimeline:
    """The timeline of one run folder. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "timeline"
        self._lock = threading.Lock()
        self._decode = msgspec.json.Decoder(_Event).decode
        self._begin()

    def _begin(self) -> None:
        self._files = FollowedFiles(self._folder, "*.jsonl")
        self._tracks: dict[str, dict[str, Track]] = {}
        self._origin_s: float | None = None
        self._end_s = 0.0

    def picture(self, query: TimelineQuery) -> dict[str, Any]:
        """The rows and shares of the range, at a resolution of `pixels`."""
        with self._lock:
            read = self._update()
            origin_s = self._origin_s or 0.0
            whole_s = max(0.0, self._end_s - origin_s)
            from_s = origin_s + (0.0 if query.start is None else query.start)
            to_s = max(from_s + 1e-6, origin_s + (whole_s if query.end is None else query.end))
            tracks = list(self._all())
            rows = [self._row(role, name, track, from_s, to_s, query) for role, name, track in tracks]
            return {
                "origin_s": origin_s,
                "whole": whole_s,
                "start": from_s - origin_s,
                "end": to_s - origin_s,
                "rows": rows,
                "read": read,
                "behind": read < 1 or any(track.is_behind for _, _, track in tracks),
                "shares": self._shares(from_s, to_s),
            }

    def _row(self, role: str, name: str, track: Track, from_s: float, to_s: float, query: TimelineQuery) -> Any:
        pixel_s = (to_s - from_s) / query.pixels
        row = {"role": role, "track": name, "lanes": track.lanes, "weights": name == WEIGHTS, "waits": name == WAIT}
        if track.lanes > MANY_LANES and f"{role}/{name}" not in query.expand:
            return {**row, "density": track.density(np.linspace(from_s, to_s, query.pixels + 1))}
        origin_s = self._origin_s or 0.0
        spans = track.spans(from_s, to_s, pixel_s * max(1.0, track.lanes / MOST_LANES))
        return {
            **row,
            "spans": [[lane, round(a - origin_s, 6), round(b - origin_s, 6), *rest] for lane, a, b, *rest in spans],
        }

    def _shares(self, from_s: float, to_s: float) -> list[dict[str, Any]]:
        """For each role: the share of the range that each kind of span took, and its idle share."""
        found = []
        for role in sorted(self._tracks, key=role_order):
            tracks = self._tracks[role]
            parts = [
                {"track": name, "kind": kind, "share": share}
                for name, track in tracks.items()
                for kind, share in track.busy(from_s, to_s).items()
            ]
            found.append({"role": role, "parts": parts, "idle": _idle(tracks, from_s, to_s)})
        return found

    def _all(self) -> Iterator[tuple[str, str, Track]]:
        for role in sorted(self._tracks, key=role_order):
            for name, track in self._tracks[role].items():
                track.build()
                yield role, name, track

    def _update(self) -> float:
        """Read new events for READ_S seconds, from the start if another run has taken the folder; returns the share
        that has been read."""
        if self._files.are_replaced():
            self._begin()
        return self._files.read_lines(self._add, time.monotonic() + READ_S)

    def _add(self, _path: Path, _offset: int, lines: list[bytes]) -> None:
        for line in lines:
            try:
                event = self._decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
            tracks = self._tracks.setdefault(event.role, {})
            if event.track not in tracks:
                tracks[event.track] = Track()
            tracks[event.track].add(event)
            self._origin_s = event.start_s if self._origin_s is None else min(self._origin_s, event.start_s)
            self._end_s = max(self._end_s, event.start_s, event.end_s or 0.0)


def _idle(tracks: dict[str, Track], from_s: float, to_s: float) -> float | None:
    """Idle share as `telemetry.idle` defines it: the trainer is idle while it waits for a batch (except for the first),
    a server while it generates nothing. None for other roles."""
    generating = [tracks[name].within(from_s, to_s) for name in GENERATING if name in tracks]
    if generating:
        starts, ends = zip(*generating, strict=True)
        return 1.0 - busy_share(np.concatenate(starts), np.concatenate(ends), from_s, to_s)
    if TRACK in tracks:
        return tracks[TRACK].busy(from_s, to_s).get(WAIT, 0.0)
    return None


def timeline_routes(find_run: Callable[[str], Path]) -> APIRouter:
    """The route of timelines. `find_run` gives the folder of a run's name, or raises HTTPException."""
    routes = APIRouter()
    runs = RecentRuns(RunTimeline)

    @routes.get("/api/runs/{name}/timeline")
    def timeline(name: str, query: Annotated[TimelineQuery, Query()]) -> dict[str, Any]:
        """The timeline of a range."""
        return runs.get_run(find_run(name)).picture(query)

    return routes
