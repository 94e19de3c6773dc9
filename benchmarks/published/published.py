"""Building blocks of the studies: cells, simulation, calibration, and the baseline that a prediction must beat.

Cell      one published value and its prediction
Study     the cells of one source with their assumptions
baseline  period = a + b / (S + 1), fitted in hindsight to all cells of the study, including those to predict
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
    """A published value and its prediction."""

    where: str
    quantity: str
    measured: float
    predicted: float
    calibrates: bool = False
    tolerance: float = 0.1
    """Largest error of a hit, relative to the measured value, or with `absolute` in the quantity's unit."""
    absolute: bool = False
    baseline: float | None = None

    @property
    def error(self) -> float:
        """Predicted minus measured, relative to the measured value unless `absolute`."""
        return self._compute_error(self.predicted)

    @property
    def baseline_error(self) -> float | None:
        """Error of the baseline; None if the cell has none."""
        return None if self.baseline is None else self._compute_error(self.baseline)

    @property
    def is_hit(self) -> bool:
        """True if the error is within the tolerance."""
        return abs(self.error) <= self.tolerance

    def _compute_error(self, value: float) -> float:
        return value - self.measured if self.absolute else value / self.measured - 1


@dataclass(frozen=True, slots=True)
class Study:
    """The cells of one source."""

    title: str
    source: str
    assumptions: Sequence[str]
    cells: Sequence[Cell]


def make_settings(
    *,
    groups: int,
    max_staleness: int,
    window: int,
    steps: int,
    group_size: int,
    servers: int,
    concurrency: int,
    evicts: bool = False,
    **options: object,
) -> SimulatedSettings:
    """Make settings of a system that trains `groups` groups per step in completion order.

    At most `window` groups are admitted. With `evicts`, a full queue drops its oldest group.
    """
    # Groups are evicted only under a rate limit, so we set one that is never reached.
    rate = RateLimit(max_diff=1e14) if evicts else RateLimit()
    policy = ReplayPolicy(
        FixedWindow(max_staleness, groups, steps * groups, groups=window),
        selector="windowed_fifo",
        selector_window=window,
        on_stale="drop",
        rate=rate,
    )
    return SimulatedSettings(
        policy=policy,
        steps=steps,
        group_size=group_size,
        servers=servers,
        max_concurrency=concurrency,
        **options,  # type: ignore[arg-type]
    )


def run_simulation(settings: SimulatedSettings, timings: Timings) -> SimulatedMetrics:
    """Simulate once and return the results. The seed is always the same."""
    return summarize_run(simulate(settings, timings))


def fit_parameters(guess: Sequence[float], compute_errors: Callable[[Sequence[float]], Sequence[float]]) -> list[float]:
    """Return the positive parameters with the least squared errors, within a factor of 10 around `guess`.

    The fit is in logarithms, so that parameters stay positive and steps are relative.
    """
    log_guess = np.log(guess)
    result = least_squares(
        lambda logs: np.array(compute_errors(np.exp(logs).tolist())),
        log_guess,
        bounds=(log_guess - np.log(10), log_guess + np.log(10)),
        diff_step=0.1,  # the simulation is not smooth, so a tiny difference would measure noise instead of the slope
        max_nfev=10,
    )
    return [float(value) for value in np.exp(result.x)]


def fit_baseline(points: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """Fit a + b / (S + 1) to the points (S, period) with the least relative errors. Returns S -> period."""
    terms = np.array([[1.0, 1.0 / (staleness + 1)] for staleness, _ in points])
    periods = np.array([period for _, period in points])
    (a, b), *_ = np.linalg.lstsq(terms / periods[:, None], np.ones(len(points)), rcond=None)
    return lambda staleness: float(a + b / (staleness + 1))
