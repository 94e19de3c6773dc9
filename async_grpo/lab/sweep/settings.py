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
    """Curves of several seeds at common points: their mean, lowest and highest value."""

    xs: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True, slots=True)
class GridSetting:
    """One combination of the grid with its points, one for each seed."""

    values: Mapping[str, str]
    points: Sequence[PointMetrics]

    @property
    def label(self) -> str:
        """The values, such as `max_staleness=4, preset=grpo`: keys by their last word, whole if two would be alike."""
        leaves = [key.split(".")[-1] for key in self.values]
        names = leaves if len(set(leaves)) == len(leaves) else list(self.values)
        return ", ".join(f"{name}={value}" for name, value in zip(names, self.values.values(), strict=True))

    @property
    def first(self) -> str:
        """The value of the first axis."""
        return next(iter(self.values.values()))

    @property
    def rest(self) -> str:
        """The values of the other axes, such as `preset=grpo`; "" if there is one axis."""
        return ", ".join(f"{key.split('.')[-1]}={value}" for key, value in list(self.values.items())[1:])

    @property
    def finished(self) -> list[PointMetrics]:
        """The points whose runs have finished."""
        return [point for point in self.points if point.state == FINISHED]

    def values_of(self, key: str) -> list[float]:
        """The field `key` of `PointMetrics`, for every finished seed that has it."""
        return [value for point in self.finished if (value := getattr(point, key)) is not None]

    def mean(self, key: str) -> float | None:
        """The mean of that field; None if no seed has it."""
        return mean(self.values_of(key))

    def standard_error(self, key: str) -> float | None:
        """The standard error of that mean; None for fewer than two seeds."""
        values = self.values_of(key)
        return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def settings_of(points: Sequence[PointMetrics]) -> list[GridSetting]:
    """One setting for each combination, in the order of the axes: numbers by size, words by appearance."""
    by_values: dict[tuple[str, ...], list[PointMetrics]] = {}
    for point in points:
        by_values.setdefault(tuple(point.values.values()), []).append(point)
    columns = [list(dict.fromkeys(column)) for column in zip(*by_values, strict=True)]
    ranks = [{value: rank for rank, value in enumerate(in_order(column))} for column in columns]
    ordered = sorted(by_values, key=lambda values: [rank[value] for rank, value in zip(ranks, values, strict=True)])
    return [
        GridSetting(dict(by_values[values][0].values), sorted(by_values[values], key=lambda point: point.seed))
        for values in ordered
    ]


def in_order(values: Sequence[str]) -> list[str]:
    """The values by size if all are numbers, otherwise in their given order."""
    try:
        return sorted(values, key=float)
    except ValueError:
        return list(values)


def shown_values(config: Mapping[str, Any], keys: Sequence[str]) -> dict[str, str]:
    """The values of a resolved configuration for the keys of the grid, in short form.

    >>> shown_values({"trainer": {"optimizer": {"lr": 0.0001}}}, ["trainer.optimizer.lr"])
    {'trainer.optimizer.lr': '0.0001'}
    """
    return {key: _shown(look_up(config, key)) for key in keys}


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, Mapping)):
        return json.dumps(_without_unset(value))
    return str(value)


def _without_unset(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_unset(item) for key, item in value.items() if item not in (None, {}, [], False)}
    return [_without_unset(item) for item in value] if isinstance(value, list) else value


def band(curves: Sequence[Curve], *, over_seconds: bool) -> Band | None:
    """The smoothed mean curve, as far as every seed goes; None if that leaves no point.

    Against steps, its points are the steps of the longest seed; against seconds, they are evenly spaced. Values between
    the points of a seed are interpolated.
    """
    drawn = [curve for curve in curves if curve.steps]
    if not drawn:
        return None
    series = [
        (curve.seconds if over_seconds else curve.steps, smooth(curve.reward, smoothing_window(len(curve.reward))))
        for curve in drawn
    ]
    start, end = max(xs[0] for xs, _ in series), min(xs[-1] for xs, _ in series)
    longest = max((xs for xs, _ in series), key=len)
    steps = np.array([x for x in longest if start <= x <= end])
    grid = np.linspace(start, end, _BAND_POINTS) if over_seconds else steps
    if start > end or not len(grid):
        return None
    rewards = np.array([np.interp(grid, xs, ys) for xs, ys in series])
    return Band(grid.tolist(), rewards.mean(0).tolist(), rewards.min(0).tolist(), rewards.max(0).tolist())
