"""How well determined a prediction is: the range over timings that explain the runs about as well.

    runs --calibrate--> Timings --+--> alternatives: what the runs do not tell, assumed the other way
                                  |         |
                                  +--> simulate each point with all of them --> PredictedRange

Each alternative is compared with itself: a point counts by how much faster it is than the recorded run, both simulated
with the same alternative. So a range is narrow near the recorded run, and wide where the point depends on what the
runs do not tell. The recorded steps' own noise is added to both ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from async_grpo.lab.simulate.recorded import RecordedRun, overlap_share
from async_grpo.lab.simulate.results import summarize_run, with_enough_steps
from async_grpo.lab.simulate.settings import SimulatedSettings
from async_grpo.lab.simulate.simulation import simulate
from async_grpo.lab.simulate.timings import Timings
from async_grpo.telemetry.idle import length, merged
from async_grpo.telemetry.rows import number

OTHER_BESIDE = 1.5
"""How much slower each side may be next to the other, where one run does not tell."""
ESTIMATE_FACTOR = 1.5
"""How far an estimate from a device's peak may be off, on either side."""
WELL_DETERMINED = 0.1
"""Half width of a range, as a share, up to which a prediction counts as well determined."""
RESAMPLES = 200


@dataclass(frozen=True, slots=True)
class PredictedRange:
    """Lowest and highest tokens/s of a point that the timings allow."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the range as a share of its middle."""
        return (self.high - self.low) / (self.high + self.low)


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """What may be otherwise than the timings say."""

    alternatives: Sequence[Timings]
    anchor: SimulatedSettings | None = None
    """Settings of the recorded run, which every alternative explains. None: there is no run."""
    noise: float = 0.0
    """Standard error of the recorded tokens/s, as a share."""

    def range_of(self, settings: SimulatedSettings, timings: Timings, *, seed: int) -> PredictedRange:
        """The range of a point's tokens/s. `timings`: those by which it is predicted."""
        known = self._anchor_speed(timings, seed)
        speeds = [_speed(settings, timings, seed)]
        for other in self.alternatives:
            other = other.model_copy(update={"lengths": timings.lengths})
            speeds.append(_speed(settings, other, seed) * known / self._anchor_speed(other, seed))
        return PredictedRange(min(speeds) * (1 - 2 * self.noise), max(speeds) * (1 + 2 * self.noise))

    def _anchor_speed(self, timings: Timings, seed: int) -> float:
        if self.anchor is None:
            return 1.0
        return _speed(with_enough_steps(self.anchor, timings), timings, seed)


def uncertainty_of_runs(runs: Sequence[RecordedRun], timings: Timings) -> Uncertainty:
    """What runs that were calibrated on do not tell: with one run, how much the sides slow each other, and how the
    engine's speed depends on how full it is."""
    run = runs[-1]
    alternatives = [] if len(runs) > 1 else [_beside_each_other(run, timings), *_filled_otherwise(run, timings)]
    return Uncertainty(alternatives, SimulatedSettings.from_config(run.config), _noise_of(run))


def uncertainty_of_estimate(timings: Timings) -> Uncertainty:
    """An estimate's engines and trainer may each be faster or slower than the shares of the peak say."""
    found = []
    for factor in (1 / ESTIMATE_FACTOR, ESTIMATE_FACTOR):
        found.append(timings.model_copy(update={"engine": timings.engine.slowed_by(factor)}))
        slower = {key: getattr(timings.trainer, key) * factor for key in ("base_s", "token_s")}
        found.append(timings.model_copy(update={"trainer": timings.trainer.model_copy(update=slower)}))
    return Uncertainty(found)


def determined_in_words(ranges: Sequence[PredictedRange], uncertainty: Uncertainty) -> str:
    """How well determined the predictions are, and what would narrow their ranges."""
    widest = max(one.half_width for one in ranges)
    if widest <= WELL_DETERMINED:
        return f"well determined: the ranges are at most ±{widest:.0%}"
    if uncertainty.anchor is None:
        return f"poorly determined (up to ±{widest:.0%}): an estimate. A run of ten steps tells more (--from)"
    return (
        f"poorly determined (up to ±{widest:.0%}): other timings explain the runs as well. Give another run "
        "with --from that differs in max_staleness or rollout.max_concurrency"
    )


def baseline_of(runs: Sequence[RecordedRun], measured: Sequence[float], max_staleness: int) -> float | None:
    """Tokens/s by the simplest model, seconds per token = a + b / (S + 1), fitted to the tokens/s of these runs; None
    if they have fewer than two different S."""
    bounds = np.array([1 / (run.config.max_staleness + 1) for run in runs])
    if len(set(bounds.tolist())) < 2:
        return None
    slope, base = np.polyfit(bounds, 1 / np.array(measured), 1)
    seconds = float(base + slope / (max_staleness + 1))
    return 1 / seconds if seconds > 0 else None


def _speed(settings: SimulatedSettings, timings: Timings, seed: int) -> float:
    return summarize_run(simulate(settings, timings, seed=seed)).tokens_per_s


def _beside_each_other(run: RecordedRun, timings: Timings) -> Timings:
    """Timings with which each side slows the other, and alone is faster by what it was slowed in the run."""
    groups = [(group.started_s, group.ended_s) for group in run.groups]
    working = merged(groups)
    engine = float(np.mean([overlap_share(span, run.computing) for span in groups]))
    trainer = float(np.mean([overlap_share(span, working) for span in run.computing]))
    more = OTHER_BESIDE - 1
    faster = {key: getattr(timings.trainer, key) / (1 + more * trainer) for key in ("base_s", "token_s")}
    return timings.model_copy(
        update={
            "engine": timings.engine.slowed_by(1 / (1 + more * engine)),
            "trainer": timings.trainer.model_copy(update=faster),
            "engine_beside": OTHER_BESIDE,
            "trainer_beside": OTHER_BESIDE,
        }
    )


def _filled_otherwise(run: RecordedRun, timings: Timings) -> list[Timings]:
    """Timings whose engine takes as long for a step as full as it was in the run, but half or twice of that depends on
    how full it is."""
    running = _mean_running(run)
    engine = timings.engine
    whole_s = engine.step_s + engine.request_s * running
    found = []
    for share in _other_shares(engine.request_s * running / whole_s):
        changed = {"step_s": whole_s * (1 - share), "request_s": whole_s * share / running}
        found.append(timings.model_copy(update={"engine": engine.model_copy(update=changed)}))
    return found


def _other_shares(share: float) -> tuple[float, float]:
    """A lower and a higher share of a step that grows with the running samples."""
    return share / 2, (1 + share) / 2


def _mean_running(run: RecordedRun) -> float:
    """Mean number of samples in an engine while it generates, by the lengths and times of the groups. A sample runs for
    the share of its group's time that its length is of the longest one."""
    sample_s = busy_s = 0.0
    for server in run.servers:
        busy_s += length(merged((group.started_s, group.ended_s) for group in server.groups))
        for group in server.groups:
            if group.lengths:
                sample_s += sum(group.lengths) / max(group.lengths) * (group.ended_s - group.started_s)
    return max(1.0, min(sample_s / max(busy_s, 1e-9), float(run.config.rollout.max_concurrency)))


def _noise_of(run: RecordedRun) -> float:
    """Standard error of the run's tokens/s as a share, by resampling blocks of S + 1 steps, which wait for each
    other."""
    rows = run.undisturbed(run.steps[1:])
    pairs = np.array([[number(row, key) or 0.0 for key in ("trained_tokens", "step_s")] for row in rows])
    size = min(len(pairs), run.config.max_staleness + 1)
    blocks = np.stack([pairs[first : first + size].sum(axis=0) for first in range(len(pairs) - size + 1)])
    generator = np.random.default_rng(0)
    drawn = blocks[generator.integers(0, len(blocks), (RESAMPLES, max(1, len(pairs) // size)))].sum(axis=1)
    speeds = drawn[:, 0] / drawn[:, 1]
    return float(speeds.std() / speeds.mean())
