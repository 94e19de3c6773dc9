"""The goal of `async-grpo tune`, and the choice among many points. Pure.

    throughput  trained tokens per second
    cost        tokens per device-second: a rollout server has the devices of its engine, the trainer its ranks
    reward      tokens per second, each worth 1 / (1 + c * age) of a fresh one: minimises the time to a reward

Bounds: --max-age on the mean age, and --min-ess on the effective sample size of the importance weights, of which tokens
of age a keep the fraction exp(-d * a). Both c and d are measured or assumed, and printed.

The choice among the points within the bounds:

1. points within WORTHWHILE of the best value, because a simulation is no more accurate than that
2. of these, the ones with the smallest max_staleness: a larger one has a price in learning that no simulation shows, so
   it must gain more than the simulation's own error
3. of these, the ones whose mean age is within AGE_TOLERANCE of the lowest
4. of these, the one with the fewest changes
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from async_grpo.app.report.drawing import smoothing_window
from async_grpo.errors import ConfigError
from async_grpo.lab.simulate.recorded import RecordedRun
from async_grpo.lab.sweep.settings import GridSetting
from async_grpo.telemetry.bottleneck import WORTHWHILE
from async_grpo.telemetry.rows import number
from async_grpo.utils.text import smooth

GoalName = Literal["throughput", "cost", "reward"]
UNITS: Mapping[GoalName, str] = {
    "throughput": "tokens/s",
    "cost": "tokens per device-second",
    "reward": "fresh tokens/s",
}
AGE_TOLERANCE = 0.1
"""Relative difference in 1 + mean age up to which points count as equally fresh."""
AGE_COST = 0.02
"""Default of c, for runs whose learning was not measured."""
LEARNED_FRACTION = 0.8
"""Fraction of the reward's rise, of the setting that learned least, at which tokens are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateMetrics:
    """Metrics by which a point is judged, simulated or measured."""

    tokens_per_s: float
    age_mean: float
    ages: Mapping[float, float]
    """Age -> fraction of the trained tokens."""
    max_staleness: int
    devices: int
    changes: int
    """Number of keys that differ from the present configuration."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What to maximise, and the bounds to keep. None: no bound."""

    name: GoalName = "throughput"
    max_age: float | None = None
    min_ess: float | None = None
    age_cost: float = AGE_COST
    """c."""
    ess_decay: float = 0.0
    """d."""

    def value(self, point: CandidateMetrics) -> float:
        """Value of a point in UNITS; larger is better."""
        if self.name == "cost":
            return point.tokens_per_s / point.devices
        if self.name == "reward":
            freshness = sum(fraction / (1 + self.age_cost * age) for age, fraction in point.ages.items())
            return point.tokens_per_s * freshness
        return point.tokens_per_s

    def effective_sample_size(self, point: CandidateMetrics) -> float:
        """Effective sample size of the importance weights, as a fraction of the tokens."""
        return sum(fraction * math.exp(-self.ess_decay * age) for age, fraction in point.ages.items())

    def is_within_bounds(self, point: CandidateMetrics) -> bool:
        """True if the point keeps all bounds."""
        if self.max_age is not None and point.age_mean > self.max_age:
            return False
        return self.min_ess is None or self.effective_sample_size(point) >= self.min_ess

    def choose_point(self, points: Sequence[CandidateMetrics]) -> int:
        """Return the index of the best point. Raises ConfigError if none is within the bounds."""
        candidates = [index for index, point in enumerate(points) if self.is_within_bounds(point)]
        if not candidates:
            freshest = min(points, key=lambda point: point.age_mean)
            raise ConfigError(
                f"no point is within the bounds ({self.bounds}): the freshest has a mean age of "
                f"{freshest.age_mean:.2f} and an effective sample size of {self.effective_sample_size(freshest):.3f}. "
                "Loosen --max-age or --min-ess, or vary max_staleness down to 0"
            )

        best_value = max(self.value(points[index]) for index in candidates)
        candidates = [index for index in candidates if self.value(points[index]) >= (1 - WORTHWHILE) * best_value]

        min_staleness = min(points[index].max_staleness for index in candidates)
        candidates = [index for index in candidates if points[index].max_staleness == min_staleness]

        age_limit = (1 + AGE_TOLERANCE) * min(1 + points[index].age_mean for index in candidates)
        candidates = [index for index in candidates if 1 + points[index].age_mean <= age_limit]

        return min(candidates, key=lambda index: (points[index].changes, -self.value(points[index])))

    @property
    def rule(self) -> str:
        """Rule of the choice, in words."""
        return (
            f"of the points within {WORTHWHILE:.0%} of the most {UNITS[self.name]}, the smallest max_staleness, then "
            "the freshest, then the fewest changes"
        )

    @property
    def bounds(self) -> str:
        """The bounds in words; empty without any."""
        bounds: list[str] = []
        if self.max_age is not None:
            bounds.append(f"mean age <= {self.max_age:g}")
        if self.min_ess is not None:
            bounds.append(f"effective sample size >= {self.min_ess:g}")
        return ", ".join(bounds)

    def describe_assumptions(self, *, age_cost_measured: bool, ess_decay_measured: bool) -> list[str]:
        """Describe the constants that this goal uses, and their origin."""
        lines: list[str] = []
        if self.name == "reward":
            source = "measured" if age_cost_measured else "assumed"
            lines.append(f"{source}: a token of age a is worth 1 / (1 + {self.age_cost:.3g} a) of a fresh one")
        if self.min_ess is not None:
            source = "measured in the runs" if ess_decay_measured else "assumed"
            lines.append(f"{source}: tokens of age a have an effective sample size of exp(-{self.ess_decay:.3g} a)")
        return lines


def measure_ess_decay(runs: Sequence[RecordedRun]) -> float | None:
    """Fit d by least squares over the steps of these runs. None if all of their tokens had age 0."""
    pairs: list[tuple[float, float]] = []
    for run in runs:
        for row in run.steps:
            age = number(row, "age_mean")
            ess = number(row, "ess")
            if age and ess:
                pairs.append((age, -math.log(min(1.0, ess))))
    if not pairs:
        return None

    # The line loss = d * age goes through the origin: fresh tokens lose nothing.
    ages, losses = np.array(pairs).T
    return float(max(0.0, ages @ losses / (ages @ ages)))


def measure_age_cost(settings: Sequence[GridSetting]) -> float:
    """Fit c to a sweep over max_staleness: how many more tokens older settings needed to the reward that all reached.

    Raises ConfigError if fewer than two settings learned.
    """
    curves: list[tuple[float, list[float], float]] = []
    """Mean age, smoothed rewards, and tokens per step."""
    for setting in settings:
        for point in setting.finished:
            if len(point.curve.reward) > 4 and point.age_mean is not None and point.trained_tokens:
                rewards = smooth(point.curve.reward, smoothing_window(len(point.curve.reward)))
                curves.append((point.age_mean, rewards, point.trained_tokens / point.steps_done))

    start = max((rewards[0] for _, rewards, _ in curves), default=0.0)
    common_best = min((max(rewards) for _, rewards, _ in curves), default=0.0)
    target = start + LEARNED_FRACTION * (common_best - start)

    ages: list[float] = []
    needed_tokens: list[float] = []
    for age, rewards, tokens_per_step in curves:
        if target > start:
            steps = next(step for step, reward in enumerate(rewards, 1) if reward >= target)
            ages.append(age)
            needed_tokens.append(tokens_per_step * steps)
    if len(set(ages)) < 2:
        raise ConfigError(
            "--learning: its runs do not show the cost of age: at least two finished settings of different age must "
            "have learned. Use a sweep over max_staleness, or --age-cost"
        )

    # tokens = fresh * (1 + c * age)
    slope, fresh = np.polyfit(np.array(ages), np.array(needed_tokens), 1)
    return float(max(0.0, slope / fresh)) if fresh > 0 else AGE_COST
