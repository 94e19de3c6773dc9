"""GridSetting: one combination of the grid over all of its seeds, with statistics over these seeds. Pure."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from async_grpo.app.report.drawing import smoothing_window
from async_grpo.lab.sweep.results import FINISHED, Curve, PointMetrics
from async_grpo.telemetry.rows import mean
from async_grpo.utils.dotted import look_up
from async_grpo.utils.text import smooth

_BAND_POINTS = 200


@dataclass(frozen=True, slots=True)
class Band:
    """Mean, lowest and highest value of several seeds' curves at common points."""

    xs: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True, slots=True)
class GridSetting:
    """One combination of the grid with its points, one per seed."""

    values: Mapping[str, str]
    points: Sequence[PointMetrics]

    @property
    def label(self) -> str:
        """The values, such as `max_staleness=4, preset=grpo`.

        Keys are shortened to their last word, unless two would become equal.
        """
        names = [_last_word(key) for key in self.values]
        if len(set(names)) < len(names):
            names = list(self.values)
        return ", ".join(f"{name}={value}" for name, value in zip(names, self.values.values(), strict=True))

    @property
    def first(self) -> str:
        """The value of the first axis."""
        return next(iter(self.values.values()))

    @property
    def rest(self) -> str:
        """The values of the other axes, such as `preset=grpo`; "" if there is one axis."""
        others = list(self.values.items())[1:]
        return ", ".join(f"{_last_word(key)}={value}" for key, value in others)

    @property
    def finished(self) -> list[PointMetrics]:
        """The points whose runs have finished."""
        return [point for point in self.points if point.state == FINISHED]

    def values_of(self, key: str) -> list[float]:
        """Return field `key` of PointMetrics for every finished seed that has it."""
        values = [getattr(point, key) for point in self.finished]
        return [value for value in values if value is not None]

    def mean(self, key: str) -> float | None:
        """Return the mean of field `key`; None if no seed has it."""
        return mean(self.values_of(key))

    def standard_error(self, key: str) -> float | None:
        """Return the standard error of that mean; None for fewer than two seeds."""
        values = self.values_of(key)
        return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def group_by_setting(points: Sequence[PointMetrics]) -> list[GridSetting]:
    """Return one setting per combination, in the order of the axes: numbers by size, words by appearance."""
    points_by_values: dict[tuple[str, ...], list[PointMetrics]] = {}
    for point in points:
        points_by_values.setdefault(tuple(point.values.values()), []).append(point)

    # Rank of each value on its axis. Sorting by the ranks compares numbers as numbers although they are text.
    axes = [list(dict.fromkeys(axis)) for axis in zip(*points_by_values, strict=True)]
    ranks = [{value: rank for rank, value in enumerate(sort_values(axis))} for axis in axes]

    def axis_ranks(values: tuple[str, ...]) -> list[int]:
        return [rank[value] for rank, value in zip(ranks, values, strict=True)]

    settings = []
    for values in sorted(points_by_values, key=axis_ranks):
        members = sorted(points_by_values[values], key=lambda point: point.seed)
        settings.append(GridSetting(dict(members[0].values), members))
    return settings


def sort_values(values: Sequence[str]) -> list[str]:
    """Return the values by size if all are numbers, otherwise in their given order."""
    try:
        return sorted(values, key=float)
    except ValueError:
        return list(values)


def format_values(config: Mapping[str, Any], keys: Sequence[str]) -> dict[str, str]:
    """Return the values of a resolved configuration for the keys of the grid, in short form.

    >>> format_values({"trainer": {"optimizer": {"lr": 0.0001}}}, ["trainer.optimizer.lr"])
    {'trainer.optimizer.lr': '0.0001'}
    """
    return {key: _format_value(look_up(config, key)) for key in keys}


def _format_value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, Mapping)):
        return json.dumps(_without_unset(value))
    return str(value)


def _without_unset(value: Any) -> Any:
    """Remove keys that are null, empty or false, at every level."""
    if isinstance(value, Mapping):
        return {key: _without_unset(item) for key, item in value.items() if item not in (None, {}, [], False)}
    if isinstance(value, list):
        return [_without_unset(item) for item in value]
    return value


def reward_band(curves: Sequence[Curve], *, over_seconds: bool) -> Band | None:
    """Return the smoothed mean curve over the range that all seeds cover; None if that range is empty.

    Against steps, its points are the steps of the longest seed; against seconds, they are evenly spaced. Values between
    the points of a seed are interpolated.
    """
    series = []
    for curve in curves:
        if curve.steps:
            xs = curve.seconds if over_seconds else curve.steps
            series.append((xs, smooth(curve.reward, smoothing_window(len(curve.reward)))))
    if not series:
        return None

    start = max(xs[0] for xs, _ in series)
    end = min(xs[-1] for xs, _ in series)
    if over_seconds:
        grid = np.linspace(start, end, _BAND_POINTS)
    else:
        longest = max((xs for xs, _ in series), key=len)
        grid = np.array([x for x in longest if start <= x <= end])
    if start > end or not len(grid):
        return None
    rewards = np.array([np.interp(grid, xs, ys) for xs, ys in series])
    return Band(grid.tolist(), rewards.mean(0).tolist(), rewards.min(0).tolist(), rewards.max(0).tolist())


def _last_word(key: str) -> str:
    return key.split(".")[-1]
