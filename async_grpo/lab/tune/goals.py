"""What `async-grpo tune` looks for, and which of many points that is. Pure.

    throughput  trained tokens a second
    cost        tokens a device-second: a rollout server has the devices of its engine, the trainer its ranks
    reward      tokens a second, each worth 1 / (1 + c * age) of a fresh one: the time to a reward is shortest

Bounds: --max-age on the mean age, --min-ess on the effective sample size of the importance weights, of which a token of
age a keeps the share exp(-d * a). Both c and d are measured or assumed, and printed.

The choice among the points that keep the bounds: those within WORTHWHILE of the best count as equally good, because a
simulation is no better than that. Of these, those with the smallest max_staleness, and of these again those whose mean
age is within AGE_TOLERANCE of the lowest; of these the one with the fewest changes. A larger max_staleness has a price
in learning that no simulation shows, so it must earn more than the simulation's own error.
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
"""Share by which 1 + mean age may differ and still count as equally fresh."""
AGE_COST = 0.02
"""c, where no learning was measured."""
LEARNED_SHARE = 0.8
"""Share of the reward's rise, of the setting that learned least, to which times are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PointFigures:
    """The figures of a point by which it is judged, simulated or measured."""

    tokens_per_s: float
    age_mean: float
    ages: Mapping[float, float]
    """Age -> share of the trained tokens."""
    max_staleness: int
    devices: int
    changes: int
    """Number of keys by which it differs from the present configuration."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What is best, and what must hold. None: no bound."""

    name: GoalName = "throughput"
    max_age: float | None = None
    min_ess: float | None = None
    age_cost: float = AGE_COST
    ess_decay: float = 0.0

    def value(self, one: PointFigures) -> float:
        """How good a point is: more is better. Units are those of UNITS."""
        if self.name == "cost":
            return one.tokens_per_s / one.devices
        if self.name == "reward":
            return one.tokens_per_s * sum(share / (1 + self.age_cost * age) for age, share in one.ages.items())
        return one.tokens_per_s

    def ess(self, one: PointFigures) -> float:
        """The effective sample size of the importance weights, as a share of the tokens."""
        return sum(share * math.exp(-self.ess_decay * age) for age, share in one.ages.items())

    def allows(self, one: PointFigures) -> bool:
        """Whether the point keeps the bounds."""
        return (self.max_age is None or one.age_mean <= self.max_age) and (
            self.min_ess is None or self.ess(one) >= self.min_ess
        )

    def choose(self, points: Sequence[PointFigures]) -> int:
        """The place of the best point. Raises ConfigError if none keeps the bounds."""
        allowed = [place for place, one in enumerate(points) if self.allows(one)]
        if not allowed:
            freshest = min(points, key=lambda one: one.age_mean)
            raise ConfigError(
                f"no point keeps the bounds ({self.bounds}): the freshest has a mean age of {freshest.age_mean:.2f} "
                f"and an effective sample size of {self.ess(freshest):.3f}. Loosen --max-age or --min-ess, or vary "
                "max_staleness down to 0"
            )
        best = max(self.value(points[place]) for place in allowed)
        near = [place for place in allowed if self.value(points[place]) >= (1 - WORTHWHILE) * best]
        least = min(points[place].max_staleness for place in near)
        near = [place for place in near if points[place].max_staleness == least]
        oldest = (1 + AGE_TOLERANCE) * min(1 + points[place].age_mean for place in near)
        fresh = [place for place in near if 1 + points[place].age_mean <= oldest]
        return min(fresh, key=lambda place: (points[place].changes, -self.value(points[place])))

    @property
    def rule(self) -> str:
        """How the choice is made, in words."""
        return (
            f"of the points within {WORTHWHILE:.0%} of the most {UNITS[self.name]}, the smallest max_staleness, then "
            "the freshest, then the fewest changes"
        )

    @property
    def bounds(self) -> str:
        """The bounds in words; "" without any."""
        age = [] if self.max_age is None else [f"mean age <= {self.max_age:g}"]
        return ", ".join(age + ([] if self.min_ess is None else [f"effective sample size >= {self.min_ess:g}"]))

    def assumptions(self, *, learning_measured: bool, ess_measured: bool) -> list[str]:
        """What is known of learning, as far as this goal uses it, and whether it was measured, in words."""
        found = []
        if self.name == "reward":
            source = "measured" if learning_measured else "assumed"
            found.append(f"{source}: a token of age a is worth 1 / (1 + {self.age_cost:.3g} a) of a fresh one")
        if self.min_ess is not None:
            source = "measured in the runs" if ess_measured else "assumed"
            found.append(f"{source}: tokens of age a have an effective sample size of exp(-{self.ess_decay:.3g} a)")
        return found


def measured_ess_decay(runs: Sequence[RecordedRun]) -> float | None:
    """d, by least squares over the steps of these runs; None if none trained tokens that were older than 0."""
    pairs = [(number(row, "age_mean"), number(row, "ess")) for run in runs for row in run.steps]
    known = [(age, -math.log(min(1.0, ess))) for age, ess in pairs if age and ess]
    if not known:
        return None
    ages, losses = np.array(known).T
    return float(max(0.0, ages @ losses / (ages @ ages)))


def measured_age_cost(settings: Sequence[GridSetting]) -> float:
    """c, from a sweep over max_staleness: by how many more tokens the settings with older tokens reached the reward
    that all of them reached. Raises ConfigError if fewer than two settings learned."""
    curves = []
    for setting in settings:
        for point in setting.finished:
            if len(point.curve.reward) > 4 and point.age_mean is not None and point.trained_tokens:
                rewards = smooth(point.curve.reward, smoothing_window(len(point.curve.reward)))
                curves.append((point.age_mean, rewards, point.trained_tokens / point.steps_done))
    start = max((rewards[0] for _, rewards, _ in curves), default=0.0)
    reach = start + LEARNED_SHARE * (min((max(rewards) for _, rewards, _ in curves), default=0.0) - start)
    spent = [
        (age, tokens * next(step for step, reward in enumerate(rewards, 1) if reward >= reach))
        for age, rewards, tokens in curves
        if reach > start
    ]
    if len({age for age, _ in spent}) < 2:
        raise ConfigError(
            "--learning: its runs do not show what age costs: at least two finished settings of different age must "
            "have learned. Give a sweep over max_staleness, or --age-cost"
        )
    ages, tokens = np.array(spent).T
    slope, fresh = np.polyfit(ages, tokens, 1)
    return float(max(0.0, slope / fresh)) if fresh > 0 else AGE_COST
