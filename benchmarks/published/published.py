"""What a prediction of a published measurement is made of, and the baseline that it must beat.

Cell      one published figure: where it was measured, what it is, what was predicted, and whether it calibrated
Study     the cells of one source with its assumptions
baseline  period = a + b / (S + 1), fitted in hindsight to every cell of the study, those to be predicted too
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from async_grpo.lab.simulate.results import SimulatedMetrics, summarize_run
from async_grpo.lab.simulate.settings import FixedWindow, SimulatedSettings
from async_grpo.lab.simulate.simulation import simulate
from async_grpo.lab.simulate.timings import Timings
from async_grpo.staleness import RateLimit, ReplayPolicy


@dataclass(frozen=True, slots=True)
class Cell:
    """One published figure and its prediction."""

    where: str
    quantity: str
    measured: float
    predicted: float
    calibrates: bool = False
    tolerance: float = 0.1
    """Largest error that counts as a hit: a share, or with `absolute` the difference itself."""
    absolute: bool = False
    baseline: float | None = None

    @property
    def error(self) -> float:
        """Predicted less measured, as a share of the measured unless `absolute`."""
        return self._off(self.predicted)

    @property
    def baseline_error(self) -> float | None:
        """The same of the baseline."""
        return None if self.baseline is None else self._off(self.baseline)

    @property
    def hits(self) -> bool:
        """Whether the prediction is within the tolerance."""
        return abs(self.error) <= self.tolerance

    def _off(self, value: float) -> float:
        return value - self.measured if self.absolute else value / self.measured - 1


@dataclass(frozen=True, slots=True)
class Study:
    """The cells of one source."""

    title: str
    source: str
    assumptions: Sequence[str]
    cells: Sequence[Cell]


def settings_like(
    *,
    groups: int,
    max_staleness: int,
    window: int,
    steps: int,
    group_size: int,
    servers: int,
    concurrency: int,
    evicts: bool = False,
    **others: object,
) -> SimulatedSettings:
    """Settings of a system that trains `groups` groups a step in the order in which they finish, of at most `window`
    admitted ones. `evicts`: a full queue drops its oldest group."""
    policy = ReplayPolicy(
        FixedWindow(max_staleness, groups, steps * groups, groups=window),
        selector="windowed_fifo",
        selector_window=window,
        on_stale="drop",
        rate=RateLimit(max_diff=1e14) if evicts else RateLimit(),
    )
    return SimulatedSettings(
        policy=policy,
        steps=steps,
        group_size=group_size,
        servers=servers,
        max_concurrency=concurrency,
        **others,  # type: ignore[arg-type]
    )


def run(settings: SimulatedSettings, timings: Timings) -> SimulatedMetrics:
    """The figures of one simulation, always with the same seed."""
    return summarize_run(simulate(settings, timings))


def solve(guess: Sequence[float], errors: Callable[[Sequence[float]], Sequence[float]]) -> list[float]:
    """Positive parameters for which the relative errors are least, within a factor of 10 around a guess."""
    first = np.log(guess)
    found = least_squares(
        lambda logs: np.array(errors(np.exp(logs).tolist())),
        first,
        bounds=(first - np.log(10), first + np.log(10)),
        diff_step=0.1,
        max_nfev=10,
    )
    return [float(value) for value in np.exp(found.x)]


def hindsight(points: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """S -> period of the baseline a + b / (S + 1) that fits the points (S, period) best in relative terms."""
    spans = np.array([[1.0, 1.0 / (staleness + 1)] for staleness, _ in points])
    periods = np.array([period for _, period in points])
    (a, b), *_ = np.linalg.lstsq(spans / periods[:, None], np.ones(len(points)), rcond=None)
    return lambda staleness: float(a + b / (staleness + 1))
