"""StepColumns: the metrics of a run's steps as columns that grow with its file, and curves of them for the screen.

    metrics.jsonl         --read_new_rows-->   key -> one number per step  --downsample--> at most MAX_POINTS per curve
    timeline/rollout-*    --read_new_spans-->  spans                       --> idle share of the servers

Long files are read in parts: a call stops after its time budget and returns the share that has been read; the next call
continues. A run of 100,000 steps takes about 50 MB. Nested fields have dotted keys: `age_histogram.2`.
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from async_grpo.lab.view.followed import FollowedFiles
from async_grpo.telemetry.charts import AGES, METRIC_CHARTS, ROLLOUT_IDLE, TOKENS_BY_AGE, TRAINER_IDLE, Chart
from async_grpo.telemetry.idle import GENERATING, idle_s
from async_grpo.telemetry.jsonl import parse_rows
from async_grpo.telemetry.rows import count_warmup_steps, rate

READ_S = 0.25
"""Seconds that a request may spend on reading new rows. The page asks again until everything has been read."""
MAX_POINTS = 2000
"""Maximum points of a curve, more than a screen has columns."""
MAX_WARNINGS = 200
AGE_PREFIX = f"{TOKENS_BY_AGE.family}."
"""Prefix of the keys of tokens by age."""

Floats = npt.NDArray[np.float64]


class StepColumns:
    """The steps of one run. A step that was repeated after a restart has the values of its last row. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir
        self.lock = threading.RLock()
        """Take it to read the same steps in several calls."""
        self._reset()

    def _reset(self) -> None:
        self._files = FollowedFiles(self._folder, "metrics.jsonl")
        self._servers = ServerSpans(self._folder)
        self._row_count = 0
        self._columns: dict[str, array[float]] = {}
        self._ordered_rows = 0
        """Rows that `_order` covers."""
        self._order: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.warnings: deque[dict[str, Any]] = deque(maxlen=MAX_WARNINGS)

    def read_new_rows(self, budget_s: float = math.inf) -> float:
        """Read new rows for about `budget_s` seconds, from the start if another run has replaced the file.

        Returns the share of the file that has been read; 1 means all of it.
        """
        with self.lock:
            if self._files.are_replaced():
                self._reset()
            return self._files.read_lines(self._add_lines, time.monotonic() + budget_s)

    def read_new_spans(self, budget_s: float = math.inf) -> float:
        """Read new spans of the servers' timelines, from which their idle shares are computed.

        Budget and result are as for `read_new_rows`.
        """
        with self.lock:
            return self._servers.read_new_spans(time.monotonic() + budget_s)

    def _add_lines(self, _path: Path, _offset: int, lines: list[bytes]) -> None:
        rows = list(parse_rows(lines))
        self.warnings.extend(row for row in rows if row.get("kind") == "warning")
        steps = [row for row in rows if row.get("kind") == "step" and isinstance(row.get("step"), int)]
        for key, values in _flatten_columns(steps):
            # Fill up with NaN for earlier rows without this key.
            column = self._columns.setdefault(key, array("d"))
            column.extend([np.nan] * (self._row_count - len(column)))
            column.frombytes(values.tobytes())
        self._row_count += len(steps)

    def _step_order(self) -> npt.NDArray[np.int64]:
        """Return the index of the last row of each step, sorted by step."""
        if self._ordered_rows != self._row_count:
            # np.unique returns the first index of each value, so search from the end.
            _, from_end = np.unique(self._raw_column("step")[::-1], return_index=True)
            self._order = self._row_count - 1 - from_end
            self._ordered_rows = self._row_count
        return self._order

    def _raw_column(self, key: str) -> Floats:
        """Return one number per row, in the order of the file."""
        values = np.full(self._row_count, np.nan)
        column = self._columns.get(key, array("d"))
        values[: len(column)] = column
        return values

    def __len__(self) -> int:
        with self.lock:
            return len(self._step_order())

    def keys(self) -> list[str]:
        """Return the keys that at least one step has."""
        with self.lock:
            return list(self._columns)

    def column(self, key: str) -> Floats:
        """Return one number per step, sorted by step, NaN where it is missing.

        TRAINER_IDLE and ROLLOUT_IDLE are keys too.
        """
        with self.lock:
            if key == TRAINER_IDLE:
                with np.errstate(invalid="ignore", divide="ignore"):
                    shares: Floats = self.column("wait_s") / self.column("step_s")
                return np.where(np.isfinite(shares), shares, np.nan)
            if key == ROLLOUT_IDLE:
                return self._servers.idle_shares(self.column("time_s"), self.column("step_s"))
            return self._raw_column(key)[self._step_order()]

    def last_value(self, key: str) -> float | None:
        """Return the value of the newest step that has one."""
        values = self.column(key)
        present = values[~np.isnan(values)]
        return float(present[-1]) if len(present) else None

    def mean_values(self, keys: Sequence[str]) -> dict[str, float]:
        """Return the mean over the steps for each key that at least one step has."""
        means = {}
        for key in keys:
            values = self.column(key)
            if not np.isnan(values).all():
                means[key] = float(np.nanmean(values))
        return means

    def mean_in_ranges(self, key: str, count: int) -> list[float]:
        """Return the means of at most `count` ranges of neighbouring steps, in order, without empty ones."""
        values = self.column(key)
        values = values[~np.isnan(values)]
        if not len(values):
            return []
        starts = _column_starts(len(values), count)
        sums = np.add.reduceat(values, starts)
        means: list[float] = np.round(sums / np.diff([*starts, len(values)]), 4).tolist()
        return means

    def tokens_per_s(self, max_staleness: Any) -> float | None:
        """Return the tokens trained per second over the steps after the head start, as in reports; None if unknown."""
        window = max_staleness if isinstance(max_staleness, int) else 0
        with self.lock:
            trained = self.column("trained_tokens")
            durations_s = self.column("step_s")
        first = count_warmup_steps(len(trained), window)
        if np.isnan(trained[first:]).all():
            return None
        return rate(float(np.nansum(trained[first:])), float(np.nansum(durations_s[first:])))

    def x_values(self, axis: str) -> Floats:
        """Return the steps' coordinates on an axis: `step`, or `time` in seconds since the end of the first step."""
        if axis != "time":
            return self.column("step")
        times = self.column("time_s")
        return times - times[0] if len(times) else times

    def age_shares(self, axis: str, max_columns: int = 400) -> dict[str, Any]:
        """Return the share of the trained tokens at each age, [age][column].

        Neighbouring steps share a column if there are more than `max_columns`.
        """
        with self.lock:
            ages = sorted(int(key.removeprefix(AGE_PREFIX)) for key in self.keys() if key.startswith(AGE_PREFIX))
            x = self.x_values(axis)
            if not ages:
                return {"x": [], "ages": [], "share": []}
            tokens = np.array([np.nan_to_num(self.column(f"{AGE_PREFIX}{age}")) for age in ages])
        starts = _column_starts(len(x), max_columns)
        summed = np.add.reduceat(tokens, starts, axis=1)
        share = summed / np.maximum(summed.sum(axis=0), 1)
        return {"x": x[starts].tolist(), "ages": ages, "share": np.round(share, 4).tolist()}


class ServerSpans:
    """The times at which each rollout server of a run generated."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "timeline"
        self._reset()

    def _reset(self) -> None:
        self._files = FollowedFiles(self._folder, "rollout-*.jsonl")
        self._spans: dict[Path, tuple[array[float], array[float]]] = {}
        self._is_complete = False

    def read_new_spans(self, until: float) -> float:
        """Read new spans until `time.monotonic()` reaches `until`, from the start if another run has replaced a file.

        Returns the share that has been read.
        """
        if self._files.are_replaced():
            self._reset()
        read = self._files.read_lines(self._add_lines, until)
        self._is_complete = read == 1
        return read

    def _add_lines(self, path: Path, _offset: int, lines: list[bytes]) -> None:
        rows = [row for row in parse_rows(lines) if row.get("track") in GENERATING]
        starts = _to_floats([row.get("start_s") for row in rows])
        ends = _to_floats([row.get("end_s") for row in rows])
        is_valid = ~np.isnan(starts) & ~np.isnan(ends)
        start_column, end_column = self._spans.setdefault(path, (array("d"), array("d")))
        start_column.frombytes(starts[is_valid].tobytes())
        end_column.frombytes(ends[is_valid].tobytes())

    def idle_shares(self, ends: Floats, lengths: Floats) -> Floats:
        """Return the share of each step in which a server generated nothing, mean over the servers.

        `ends` and `lengths` are those of the steps in seconds. NaN where it is unknown, and everywhere until all
        timelines have been read: a server whose spans are still unread would look idle.
        """
        shares = np.full(len(ends), np.nan)
        if self._is_complete and self._spans:
            is_valid = ~np.isnan(ends) & (lengths > 0)
            ends = ends[is_valid]
            lengths = lengths[is_valid]
            servers = [(np.array(start), np.array(end)) for start, end in self._spans.values()]
            shares[is_valid] = idle_s(ends - lengths, ends, servers) / lengths
        return shares


def downsample(x: Floats, y: Floats, max_points: int = MAX_POINTS) -> tuple[Floats, Floats]:
    """Return at most `max_points` points of a curve.

    Of each range of neighbouring points the lowest and the highest are kept, in order, so that spikes stay visible.
    """
    is_valid = ~np.isnan(y) & ~np.isnan(x)
    x = x[is_valid]
    y = y[is_valid]
    if len(y) <= max_points:
        return x, y

    size = -(-len(y) // (max_points // 2))
    padding = np.full(-len(y) % size, y[-1])
    ranges = np.append(y, padding).reshape(-1, size)
    starts = size * np.arange(len(ranges))
    indices = np.concatenate([starts + ranges.argmin(axis=1), starts + ranges.argmax(axis=1)])
    kept = np.unique(np.minimum(indices, len(y) - 1))
    return x[kept], y[kept]


def group_curves() -> list[dict[str, Any]]:
    """Return the metrics that have curves by group: key, label, unit and description of each.

    Reward, staleness and idle shares come first.
    """
    only_if_varying = {series.key for series in AGES.series if series.only_if_varying}
    groups: dict[str, list[dict[str, Any]]] = {"reward": [], "staleness": [], "idle": []}
    for key, chart in METRIC_CHARTS.items():
        entry = {
            "key": key,
            "label": chart.title,
            "unit": chart.unit,
            "doc": chart.doc,
            "only_if_varying": key in only_if_varying,
        }
        groups.setdefault(chart.group, []).append(entry)
    return [{"group": group, "metrics": metrics} for group, metrics in groups.items()]


def describe_chart(chart: Chart) -> dict[str, Any]:
    """Return a chart of `telemetry.charts` for the page. Colours are names, because each theme has its own values."""
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


def _flatten_columns(rows: Sequence[Mapping[str, Any]], prefix: str = "") -> Iterator[tuple[str, Floats]]:
    """Yield (key, one number per row), NaN where a row has none. Keys without any number are omitted."""
    for key in dict.fromkeys(chain.from_iterable(rows)):
        values = [row.get(key) for row in rows]
        if dict in set(map(type, values)):
            inner_rows = [value if isinstance(value, dict) else {} for value in values]
            yield from _flatten_columns(inner_rows, f"{prefix}{key}.")
            continue
        numbers = _to_floats(values)
        if not np.isnan(numbers).all():
            yield prefix + key, numbers


def _to_floats(values: Sequence[Any]) -> Floats:
    """Return the values as floats, NaN for anything that is not a number."""
    # Checking the set of types first is much faster than checking each value, which a long run notices.
    if not set(map(type, values)) <= {float, int, bool, type(None)}:
        values = [value if isinstance(value, (int, float)) else None for value in values]
    return np.array(values, dtype=np.float64)


def _column_starts(count: int, max_columns: int) -> list[int]:
    """Return the start of each of at most `max_columns` ranges of about equal length, none of them empty."""
    edges = np.unique(np.linspace(0, count, min(count, max_columns) + 1).astype(int))
    return [int(start) for start in edges[:-1]]
