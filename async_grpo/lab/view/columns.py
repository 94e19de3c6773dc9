"""StepColumns: the metrics of a run's steps as columns that grow with its file, and curves of them for the screen.

    metrics.jsonl         --StepColumns.update-->  key -> one number a step   --thinned-->  at most MOST_POINTS a curve
    timeline/rollout-*    --ServerSpans.update-->  spans  -->  idle share of the servers

Long files are read in parts: an update stops after its time budget and returns the share that has been read; the next
update continues. A run of 100,000 steps takes about 50 MB. Nested fields have dotted keys: `age_histogram.2`.
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from async_grpo.lab.view.followed import FollowedFiles
from async_grpo.telemetry.charts import METRIC_CHARTS, ROLLOUT_IDLE, TOKENS_BY_AGE, TRAINER_IDLE, Chart
from async_grpo.telemetry.idle import GENERATING, idle_s
from async_grpo.telemetry.jsonl import parse_rows
from async_grpo.telemetry.rows import count_warmup_steps, rate

READ_S = 0.25
"""Seconds that a request may spend on reading new rows. The page asks again until everything has been read."""
MOST_POINTS = 2000
"""Most points of a curve, more than a screen has columns."""
MOST_WARNINGS = 200
AGES = f"{TOKENS_BY_AGE.family}."

Floats = npt.NDArray[np.float64]


class StepColumns:
    """The steps of one run. A step that was repeated after a restart has the values of its last row. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir
        self.lock = threading.RLock()
        """Hold it to see the same steps in several calls."""
        self._begin()

    def _begin(self) -> None:
        self._files = FollowedFiles(self._folder, "metrics.jsonl")
        self._servers = ServerSpans(self._folder)
        self._rows = 0
        self._columns: dict[str, array[float]] = {}
        self._ordered: tuple[int, npt.NDArray[np.int64]] = (0, np.zeros(0, np.int64))
        self.warnings: deque[dict[str, Any]] = deque(maxlen=MOST_WARNINGS)

    def update(self, budget_s: float = math.inf) -> float:
        """Read new rows for about `budget_s` seconds, from the start if another run has taken the folder. Returns the
        share of the file that has been read; 1 means all of it."""
        with self.lock:
            if self._files.are_replaced():
                self._begin()
            return self._files.read_lines(self._add, time.monotonic() + budget_s)

    def update_servers(self, budget_s: float = math.inf) -> float:
        """Read new spans of the timelines, which give the idle shares of the servers; budget and result as for
        `update`."""
        with self.lock:
            return self._servers.update(time.monotonic() + budget_s)

    def _add(self, _path: Path, _offset: int, lines: list[bytes]) -> None:
        rows = list(parse_rows(lines))
        self.warnings.extend(row for row in rows if row.get("kind") == "warning")
        steps = [row for row in rows if row.get("kind") == "step" and isinstance(row.get("step"), int)]
        for key, values in _columns_of(steps):
            column = self._columns.setdefault(key, array("d"))
            column.extend([np.nan] * (self._rows - len(column)))
            column.frombytes(values.tobytes())
        self._rows += len(steps)

    def _order(self) -> npt.NDArray[np.int64]:
        """Index of the last row of each step, sorted by step."""
        if self._ordered[0] != self._rows:
            _, from_end = np.unique(self._raw("step")[::-1], return_index=True)
            self._ordered = (self._rows, self._rows - 1 - from_end)
        return self._ordered[1]

    def _raw(self, key: str) -> Floats:
        values = np.full(self._rows, np.nan)
        found = self._columns.get(key, array("d"))
        values[: len(found)] = found
        return values

    def __len__(self) -> int:
        with self.lock:
            return len(self._order())

    def keys(self) -> list[str]:
        """The keys that at least one step has."""
        with self.lock:
            return list(self._columns)

    def column(self, key: str) -> Floats:
        """One number for each step, sorted by step, NaN where it is missing. TRAINER_IDLE and ROLLOUT_IDLE are keys
        too."""
        with self.lock:
            if key == TRAINER_IDLE:
                with np.errstate(invalid="ignore", divide="ignore"):
                    shares: Floats = self.column("wait_s") / self.column("step_s")
                return np.where(np.isfinite(shares), shares, np.nan)
            if key == ROLLOUT_IDLE:
                return self._servers.idle_shares(self.column("time_s"), self.column("step_s"))
            return self._raw(key)[self._order()]

    def last(self, key: str) -> float | None:
        """The value of the newest step that has one."""
        values = self.column(key)
        known = values[~np.isnan(values)]
        return float(known[-1]) if len(known) else None

    def means(self, keys: Sequence[str]) -> dict[str, float]:
        """Mean over the steps, of the keys that at least one step has."""
        columns = {key: self.column(key) for key in keys}
        return {key: float(np.nanmean(values)) for key, values in columns.items() if not np.isnan(values).all()}

    def tokens_per_s(self, max_staleness: Any) -> float | None:
        """Tokens trained per second over the steps behind the head start, as reports have it; None if unknown."""
        window = max_staleness if isinstance(max_staleness, int) else 0
        with self.lock:
            trained, spent_s = self.column("trained_tokens"), self.column("step_s")
        first = count_warmup_steps(len(trained), window)
        if np.isnan(trained[first:]).all():
            return None
        return rate(float(np.nansum(trained[first:])), float(np.nansum(spent_s[first:])))

    def x(self, axis: str) -> Floats:
        """The steps' coordinates on the axis: `step`, or `time` in seconds since the end of the first step."""
        values = self.column("time_s" if axis == "time" else "step")
        return values - values[0] if axis == "time" and len(values) else values

    def ages(self, axis: str, most: int = 400) -> dict[str, Any]:
        """Share of the trained tokens at each age, [age][column]. Adjacent steps share a column if there are too
        many."""
        with self.lock:
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
    """The times at which each rollout server of a run generated."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "timeline"
        self._begin()

    def _begin(self) -> None:
        self._files = FollowedFiles(self._folder, "rollout-*.jsonl")
        self._spans: dict[Path, tuple[array[float], array[float]]] = {}
        self._is_whole = False

    def update(self, until: float) -> float:
        """Read new spans until `time.monotonic()` reaches `until`, from the start if another run has taken the folder.
        Returns the share that has been read."""
        if self._files.are_replaced():
            self._begin()
        read = self._files.read_lines(self._add, until)
        self._is_whole = read == 1
        return read

    def _add(self, path: Path, _offset: int, lines: list[bytes]) -> None:
        spans = [row for row in parse_rows(lines) if row.get("track") in GENERATING]
        times = [_numbers([row.get(key) for row in spans]) for key in ("start_s", "end_s")]
        known = ~np.isnan(times[0]) & ~np.isnan(times[1])
        columns = self._spans.setdefault(path, (array("d"), array("d")))
        for column, values in zip(columns, times, strict=True):
            column.frombytes(values[known].tobytes())

    def idle_shares(self, ends: Floats, lengths: Floats) -> Floats:
        """Share of each step in which a server generated nothing, mean over the servers, given the ends and lengths of
        the steps in seconds. NaN where it is unknown, and until all timelines have been read."""
        shares = np.full(len(ends), np.nan)
        known = ~np.isnan(ends) & (lengths > 0)
        if self._is_whole and self._spans:
            servers = [(np.array(start), np.array(end)) for start, end in self._spans.values()]
            ends, lengths = ends[known], lengths[known]
            shares[known] = idle_s(ends - lengths, ends, servers) / lengths
        return shares


def thinned(x: Floats, y: Floats, most: int = MOST_POINTS) -> tuple[Floats, Floats]:
    """At most `most` points of a curve: the lowest and the highest of each run of neighbouring points, in order."""
    known = ~np.isnan(y) & ~np.isnan(x)
    x, y = x[known], y[known]
    if len(y) <= most:
        return x, y
    size = -(-len(y) // (most // 2))
    parts = np.append(y, np.full(-len(y) % size, y[-1])).reshape(-1, size)
    starts = size * np.arange(len(parts))
    places = np.concatenate([starts + parts.argmin(axis=1), starts + parts.argmax(axis=1)])
    kept = np.unique(np.minimum(places, len(y) - 1))
    return x[kept], y[kept]


def curve_groups() -> list[dict[str, Any]]:
    """The metrics that have curves, by group: key, label, unit and description of each. Reward, staleness and idle
    shares come first."""
    groups: dict[str, list[dict[str, str]]] = {"reward": [], "staleness": [], "idle": []}
    for key, chart in METRIC_CHARTS.items():
        facts = {"key": key, "label": chart.title, "unit": chart.unit, "doc": chart.doc}
        groups.setdefault(chart.group, []).append(facts)
    return [{"group": group, "metrics": metrics} for group, metrics in groups.items()]


def chart_facts(chart: Chart) -> dict[str, Any]:
    """A chart of `telemetry.charts` for the page, which has its own colour for each name because of its themes."""
    series = [
        {
            "key": series.key,
            "label": series.label,
            "style": {"color": series.color.name.lower(), "dash": series.dash},
            "only_if_varying": series.only_if_varying,
        }
        for series in chart.series
    ]
    return {
        "title": chart.title,
        "unit": chart.unit,
        "group": chart.group,
        "doc": chart.doc,
        "family": chart.family,
        "series": series,
    }


def _columns_of(rows: Sequence[Mapping[str, Any]], prefix: str = "") -> Iterator[tuple[str, Floats]]:
    """Key -> its number in each row, NaN where the row has none. Keys without any number are left out."""
    for key in dict.fromkeys(chain.from_iterable(rows)):
        values = [row.get(key) for row in rows]
        if dict in set(map(type, values)):
            inner = [value if isinstance(value, dict) else {} for value in values]
            yield from _columns_of(inner, f"{prefix}{key}.")
        elif not np.isnan(found := _numbers(values)).all():
            yield prefix + key, found


def _numbers(values: Sequence[Any]) -> Floats:
    """The values as floats, NaN for anything that is not a number."""
    if not set(map(type, values)) <= {float, int, bool, type(None)}:
        values = [value if isinstance(value, (int, float)) else None for value in values]
    return np.array(values, dtype=np.float64)


def _parts(count: int, most: int) -> list[tuple[int, int]]:
    """[start, end) of at most `most` parts of equal length, none of them empty."""
    edges = np.unique(np.linspace(0, count, min(count, most) + 1).astype(int))
    return [(int(start), int(end)) for start, end in pairwise(edges)]
