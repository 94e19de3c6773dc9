"""StepColumns: what the steps of a run measured, as columns that grow with its file; and curves of them for a screen.

    metrics.jsonl         --StepColumns.update-->  key -> one number a step   --thinned-->  at most MOST_POINTS a curve
    timeline/rollout-*    --ServerSpans.update-->  spans  -->  idle share of the servers

A run of 100,000 steps takes about 50 MB. Keys of fields in fields have a dot: `age_histogram.2`.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from async_grpo.telemetry.idle import rollout_idle_s
from async_grpo.telemetry.jsonl import RowFollower
from async_grpo.telemetry.metrics import METRICS

SLICE_BYTES = 4 << 20
MOST_POINTS = 2000
"""Points of one curve: more than a screen has columns."""
MOST_WARNINGS = 200
TRAINER_IDLE, ROLLOUT_IDLE = "idle.trainer", "idle.rollout"
AGES = "age_histogram."

Floats = npt.NDArray[np.float64]


class StepColumns:
    """The steps of one run; of a step that was repeated after a restart, the last row. Threads may share it."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._lock = threading.RLock()
        self._servers = ServerSpans(run_dir)
        self._begin()

    def _begin(self) -> None:
        self._follower = RowFollower(self._path)
        self._size = 0
        self._place: dict[int, int] = {}
        self._in_order = True
        self._columns: dict[str, array[float]] = {}
        self.warnings: deque[dict[str, Any]] = deque(maxlen=MOST_WARNINGS)

    def update(self) -> None:
        """Read what is new; from the start if the file is another one by now."""
        with self._lock:
            size = self._path.stat().st_size if self._path.exists() else 0
            if size < self._size:
                self._begin()
            self._size = size
            while rows := self._follower.new_rows(SLICE_BYTES):
                for row in rows:
                    if row.get("kind") == "step" and isinstance(row.get("step"), int):
                        self._add(row)
                    elif row.get("kind") == "warning":
                        self.warnings.append(row)

    def _add(self, row: Mapping[str, Any]) -> None:
        step = row["step"]
        if step in self._place:
            for column in self._columns.values():
                if self._place[step] < len(column):
                    column[self._place[step]] = np.nan  # of the step's former row
        else:
            self._in_order &= not self._place or step > next(reversed(self._place))
        place = self._place.setdefault(step, len(self._place))
        for key, value in _numbers(row):
            column = self._columns.setdefault(key, array("d"))
            if len(column) < place:
                column.extend([np.nan] * (place - len(column)))
            if len(column) == place:
                column.append(value)
            else:
                column[place] = value

    def __len__(self) -> int:
        return len(self._place)

    def keys(self) -> list[str]:
        """The keys that any step has."""
        with self._lock:
            return list(self._columns)

    def column(self, key: str) -> Floats:
        """One number for each step, by step; NaN where it is missing. Shares of idle time have keys of their own."""
        with self._lock:
            if key == TRAINER_IDLE:
                with np.errstate(invalid="ignore", divide="ignore"):
                    shares: Floats = self.column("wait_s") / self.column("step_s")
                return np.where(np.isfinite(shares), shares, np.nan)
            if key == ROLLOUT_IDLE:
                return self._servers.idle_shares(self.column("time_s"), self.column("step_s"))
            values = np.full(len(self), np.nan)
            found = self._columns.get(key, array("d"))
            values[: len(found)] = found
            return values if self._in_order else values[np.argsort(list(self._place), kind="stable")]

    def last(self, key: str) -> float | None:
        """The value of the newest step that has one."""
        values = self.column(key)
        known = values[~np.isnan(values)]
        return float(known[-1]) if len(known) else None

    def x(self, axis: str) -> Floats:
        """Where each step stands on the axis: `step`, or `time` in seconds since the end of the first step."""
        values = self.column("time_s" if axis == "time" else "step")
        return values - values[0] if axis == "time" and len(values) else values

    def ages(self, axis: str, most: int = 400) -> dict[str, Any]:
        """The share of the trained tokens that had each age, [age][column]; neighbouring steps share a column."""
        ages = sorted(int(key.removeprefix(AGES)) for key in self.keys() if key.startswith(AGES))
        x = self.x(axis)
        if not ages:
            return {"x": [], "ages": [], "share": []}
        tokens = np.array([np.nan_to_num(self.column(f"{AGES}{age}")) for age in ages])
        starts = [start for start, _ in _parts(len(x), most)]
        summed = np.add.reduceat(tokens, starts, axis=1)
        share = summed / np.maximum(summed.sum(axis=0), 1)
        return {"x": x[starts].tolist(), "ages": ages, "share": np.round(share, 4).tolist()}


class ServerSpans:
    """What the rollout servers of a run generated when."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "timeline"
        self._files: dict[str, RowFollower] = {}
        self._spans: dict[str, list[dict[str, Any]]] = {}
        self._idle: tuple[tuple[int, int], Floats] = ((-1, -1), np.zeros(0))

    def update(self) -> None:
        """Read what is new."""
        for path in sorted(self._folder.glob("rollout-*.jsonl")):
            follower = self._files.setdefault(path.name, RowFollower(path))
            spans = self._spans.setdefault(path.name, [])
            while rows := follower.new_rows(SLICE_BYTES):
                for row in rows:
                    if row.get("track") in ("generation", "evaluation"):
                        self._add(row, spans)

    def _add(self, row: dict[str, Any], spans: list[dict[str, Any]]) -> None:
        start, end = row.get("start_s"), row.get("end_s")
        if not isinstance(start, float) or not isinstance(end, float):
            return
        spans.append({"track": row["track"], "start_s": start, "end_s": end})

    def idle_shares(self, ends: Floats, lengths: Floats) -> Floats:
        """Of each step, from its end and length in seconds: the share in which a server generated nothing, mean over
        the servers. NaN where it is not known."""
        self.update()
        version = (sum(map(len, self._spans.values())), len(ends))
        if self._idle[0] != version:
            known = ~np.isnan(ends) & (lengths > 0)
            times = zip(ends[known].tolist(), lengths[known].tolist(), strict=True)
            rows = [{"time_s": end, "step_s": spent} for end, spent in times]
            shares = np.full(len(ends), np.nan)
            if idle := rollout_idle_s(rows, list(self._spans.values())):
                shares[known] = np.array(idle) / lengths[known]
            self._idle = (version, shares)
        return self._idle[1]


def thinned(x: Floats, y: Floats, most: int = MOST_POINTS) -> tuple[Floats, Floats]:
    """At most `most` points of a curve: the lowest and the highest of each of equally many neighbours, in order."""
    known = ~np.isnan(y) & ~np.isnan(x)
    x, y = x[known], y[known]
    if len(y) <= most:
        return x, y
    parts = _parts(len(y), most // 2)
    kept = np.unique([start + at(y[start:end]) for start, end in parts for at in (np.argmin, np.argmax)])
    return x[kept], y[kept]


def metric_groups() -> list[dict[str, Any]]:
    """Groups of METRICS that have curves, each metric with key, label, unit and a sentence; idle shares come first."""
    idle = [
        {"key": TRAINER_IDLE, "label": "trainer idle", "unit": "share", "doc": "Share of a step spent waiting."},
        {"key": ROLLOUT_IDLE, "label": "rollout idle", "unit": "share", "doc": "Share without any generation."},
    ]
    groups: dict[str, list[dict[str, str]]] = {"reward": [], "staleness": [], "idle": idle}
    for metric in METRICS:
        if metric.group:
            facts = {"key": metric.key, "label": metric.label, "unit": metric.unit, "doc": metric.doc}
            groups.setdefault(metric.group, []).append(facts)
    return [{"group": group, "metrics": metrics} for group, metrics in groups.items()]


def _numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in row.items():
        if isinstance(value, (int, float)):
            yield key, float(value)
        elif isinstance(value, dict):
            yield from ((f"{key}.{inner}", float(one)) for inner, one in value.items() if isinstance(one, (int, float)))


def _parts(count: int, most: int) -> list[tuple[int, int]]:
    """[start, end) of at most `most` parts of equal length, none of them empty."""
    edges = np.unique(np.linspace(0, count, min(count, most) + 1).astype(int))
    return [(int(start), int(end)) for start, end in pairwise(edges)]
