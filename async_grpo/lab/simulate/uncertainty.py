"""Uncertainty of a prediction: its range over timings that explain the recorded runs about equally well.

    runs --calibrate--> Timings --+--> alternatives: what the runs leave open, assumed the other way
                                  |         |
                                  +--> simulate each point with all of them --> PredictedRange

Each alternative is compared with itself: it predicts by what factor a point is faster than the recorded run, both
simulated with the same alternative. So a range is narrow near the recorded run, and wide where the point depends on
what the runs leave open. The noise of the recorded steps is added at both ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from async_grpo.lab.simulate.recorded import RecordedRun, covered_fraction
from async_grpo.lab.simulate.results import summarize_run, with_enough_steps
from async_grpo.lab.simulate.settings import SimulatedSettings
from async_grpo.lab.simulate.simulation import simulate
from async_grpo.lab.simulate.timings import Timings
from async_grpo.telemetry.idle import length, merged
from async_grpo.telemetry.rows import number

ASSUMED_SLOWDOWN = 1.5
"""Factor by which each side may slow the other, where a single run leaves that open."""
ESTIMATE_FACTOR = 1.5
"""Factor by which an estimate from a device's peak may be wrong, in either direction."""
WELL_DETERMINED = 0.1
"""Maximum half width of a range, as a fraction, for a prediction to count as well determined."""
RESAMPLES = 200


@dataclass(frozen=True, slots=True)
class PredictedRange:
    """Lowest and highest tokens/s of a point over the possible timings."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the range, as a fraction of its middle."""
        return (self.high - self.low) / (self.high + self.low)


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """Alternatives to the timings of a prediction, and the noise of the run that they were fitted to."""

    alternatives: Sequence[Timings]
    anchor: SimulatedSettings | None = None
    """Settings of the recorded run, which every alternative explains. None: there is no run."""
    noise: float = 0.0
    """Standard error of the recorded tokens/s, as a fraction."""

    def predict_range(self, settings: SimulatedSettings, timings: Timings, *, seed: int) -> PredictedRange:
        """Simulate a point with its own `timings` and with all alternatives."""
        anchor_speed = self._anchor_speed(timings, seed)
        speeds = [_simulate_speed(settings, timings, seed)]
        for alternative in self.alternatives:
            alternative = alternative.model_copy(update={"lengths": timings.lengths})
            speed = _simulate_speed(settings, alternative, seed)
            speeds.append(speed * anchor_speed / self._anchor_speed(alternative, seed))
        return PredictedRange(min(speeds) * (1 - 2 * self.noise), max(speeds) * (1 + 2 * self.noise))

    def _anchor_speed(self, timings: Timings, seed: int) -> float:
        if self.anchor is None:
            return 1.0
        return _simulate_speed(with_enough_steps(self.anchor, timings), timings, seed)


def uncertainty_of_runs(runs: Sequence[RecordedRun], timings: Timings) -> Uncertainty:
    """Uncertainty of timings that were calibrated on `runs`.

    A single run leaves open how much the sides slow each other, and how the engine's speed depends on its load.
    """
    run = runs[-1]
    alternatives: list[Timings] = []
    if len(runs) == 1:
        alternatives.append(_with_mutual_slowdown(run, timings))
        alternatives += _with_other_load_dependence(run, timings)
    return Uncertainty(alternatives, SimulatedSettings.from_config(run.config), _speed_noise(run))


def uncertainty_of_estimate(timings: Timings) -> Uncertainty:
    """Uncertainty of an estimate: engines and trainer may each be faster or slower than assumed."""
    alternatives: list[Timings] = []
    for factor in (1 / ESTIMATE_FACTOR, ESTIMATE_FACTOR):
        alternatives.append(timings.model_copy(update={"engine": timings.engine.slowed_by(factor)}))
        alternatives.append(timings.model_copy(update={"trainer": timings.trainer.slowed_by(factor)}))
    return Uncertainty(alternatives)


def describe_uncertainty(ranges: Sequence[PredictedRange], uncertainty: Uncertainty) -> str:
    """Describe how well determined the predictions are, and what would narrow their ranges."""
    half_width = max(predicted.half_width for predicted in ranges)
    if half_width <= WELL_DETERMINED:
        return f"well determined: the ranges are at most ±{half_width:.0%}"
    if uncertainty.anchor is None:
        return f"poorly determined (up to ±{half_width:.0%}): an estimate. Calibrate on a run of ten steps (--from)"
    return (
        f"poorly determined (up to ±{half_width:.0%}): other timings explain the runs equally well. Add another run "
        "with --from that differs in max_staleness or rollout.max_concurrency"
    )


def predict_by_baseline(runs: Sequence[RecordedRun], tokens_per_s: Sequence[float], max_staleness: int) -> float | None:
    """Predict tokens/s by the simplest model, seconds per token = a + b / (S + 1).

    It is fitted to the tokens/s of the runs. None if these have fewer than two different S.
    """
    inverse_windows = np.array([1 / (run.config.max_staleness + 1) for run in runs])
    if len(set(inverse_windows.tolist())) < 2:
        return None
    b, a = np.polyfit(inverse_windows, 1 / np.array(tokens_per_s), 1)
    token_s = float(a + b / (max_staleness + 1))
    return 1 / token_s if token_s > 0 else None


def _simulate_speed(settings: SimulatedSettings, timings: Timings, seed: int) -> float:
    return summarize_run(simulate(settings, timings, seed=seed)).tokens_per_s


def _with_mutual_slowdown(run: RecordedRun, timings: Timings) -> Timings:
    """Timings where each side slows the other. Alone, each is faster by what it was slowed down in the run."""
    groups = [(group.started_s, group.ended_s) for group in run.groups]
    generating = merged(groups)
    engine_overlap = float(np.mean([covered_fraction(span, run.computing) for span in groups]))
    trainer_overlap = float(np.mean([covered_fraction(span, generating) for span in run.computing]))

    extra = ASSUMED_SLOWDOWN - 1
    trainer_slowdown = 1 + extra * trainer_overlap
    faster = {key: getattr(timings.trainer, key) / trainer_slowdown for key in ("base_s", "token_s")}
    return timings.model_copy(
        update={
            "engine": timings.engine.slowed_by(1 / (1 + extra * engine_overlap)),
            "trainer": timings.trainer.model_copy(update=faster),
            "engine_beside": ASSUMED_SLOWDOWN,
            "trainer_beside": ASSUMED_SLOWDOWN,
        }
    )


def _with_other_load_dependence(run: RecordedRun, timings: Timings) -> list[Timings]:
    """Timings whose engine is as fast as in the run at the run's load, but whose decoding step depends on the load
    half as much, or halfway more."""
    running = _mean_running(run)
    engine = timings.engine
    step_s = engine.step_s + engine.request_s * running
    fraction = engine.request_s * running / step_s  # of the step that grows with the running samples

    alternatives: list[Timings] = []
    for other in (fraction / 2, (1 + fraction) / 2):
        changed = {"step_s": step_s * (1 - other), "request_s": step_s * other / running}
        alternatives.append(timings.model_copy(update={"engine": engine.model_copy(update=changed)}))
    return alternatives


def _mean_running(run: RecordedRun) -> float:
    """Mean number of running samples in an engine that generates, from the lengths and times of the groups.

    A sample is assumed to run for the fraction of its group's time that its length is of the longest one.
    """
    sample_s = 0.0
    busy_s = 0.0
    for server in run.servers:
        busy_s += length(merged((group.started_s, group.ended_s) for group in server.groups))
        for group in server.groups:
            if group.lengths:
                sample_s += sum(group.lengths) / max(group.lengths) * (group.ended_s - group.started_s)
    return max(1.0, min(sample_s / max(busy_s, 1e-9), float(run.config.rollout.max_concurrency)))


def _speed_noise(run: RecordedRun) -> float:
    """Standard error of the run's tokens/s, as a fraction, by a block bootstrap.

    Blocks have S + 1 steps, because the steps of a window wait for each other and are not independent.
    """
    rows = run.without_outages(run.steps[1:])
    tokens_and_seconds = np.array([[number(row, key) or 0.0 for key in ("trained_tokens", "step_s")] for row in rows])
    size = min(len(rows), run.config.max_staleness + 1)
    blocks = np.stack([tokens_and_seconds[first : first + size].sum(axis=0) for first in range(len(rows) - size + 1)])

    generator = np.random.default_rng(0)
    indices = generator.integers(0, len(blocks), (RESAMPLES, max(1, len(rows) // size)))
    resampled = blocks[indices].sum(axis=1)
    speeds = resampled[:, 0] / resampled[:, 1]
    return float(speeds.std() / speeds.mean())
