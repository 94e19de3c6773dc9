"""TuningSearch: points, each simulated once, and the best of them.

All points of a small space are simulated. Of a larger one Optuna's multi-objective TPE sampler proposes points that are
good or fresh (Bergstra et al. 2011; Ozaki et al., GECCO 2020); then the neighbours of the best are simulated until none
is better, so that the choice is at least a local optimum on every axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from async_grpo.app.launch.plan import plan_run
from async_grpo.config import RunConfig, load
from async_grpo.errors import ConfigError, DependencyError
from async_grpo.lab.simulate.calibrate import MeasuredMetrics
from async_grpo.lab.simulate.results import SimulatedMetrics, summarize_run, with_enough_steps
from async_grpo.lab.simulate.settings import SimulatedSettings
from async_grpo.lab.simulate.simulation import simulate
from async_grpo.lab.simulate.timings import Timings
from async_grpo.lab.tune.goals import Goal, PointFigures
from async_grpo.lab.tune.space import Overrides, TuningAxis, combined

FRONT_GAIN = 0.005
"""Share by which a point of the front is better than the fresher ones."""
STARTUP_TRIALS = 20
"""Points that the sampler draws at random before it models them."""

Places = tuple[int, ...]
"""A point: the place of its choice on every axis. All 0 is the present configuration."""


@dataclass(frozen=True, slots=True)
class TunedPoint:
    """A point and what the simulation says of it."""

    places: Places
    overrides: Overrides
    config: RunConfig
    simulated: SimulatedMetrics
    figures: PointFigures

    def measured(self, found: MeasuredMetrics) -> PointFigures:
        """Its figures by a real run: the simulated ages are shifted to the measured mean."""
        shift = found.age_mean - self.figures.age_mean
        ages = {age + shift: share for age, share in self.figures.ages.items()}
        return replace(self.figures, tokens_per_s=found.tokens_per_s, age_mean=found.age_mean, ages=ages)


class TuningSearch:
    """Simulates points of a space around a configuration."""

    def __init__(
        self, file: Path, overrides: Sequence[str], axes: Sequence[TuningAxis], timings: Timings, goal: Goal, seed: int
    ) -> None:
        self._file, self._overrides = file, overrides
        self.axes, self._timings, self._goal, self._seed = axes, timings, goal, seed
        self._points: dict[Places, TunedPoint | None] = {}
        self._unusable: set[Places] = set()
        self._points[(0,) * len(axes)] = self.present = self._simulate((0,) * len(axes))

    @property
    def size(self) -> int:
        """Points of the space."""
        return math.prod(len(axis.choices) for axis in self.axes)

    @property
    def points(self) -> list[TunedPoint]:
        """Every point that was simulated and can be run, the present one first."""
        return [one for one in self._points.values() if one is not None and one.places not in self._unusable]

    def point(self, places: Places) -> TunedPoint | None:
        """The point, simulated at most once; None if it is refused or would stall."""
        if places not in self._points:
            try:
                self._points[places] = self._simulate(places)
            except ConfigError:
                self._points[places] = None
        return self._points[places]

    def explore(self, trials: int) -> None:
        """Simulate all points if they are no more than `trials`, else as many as that."""
        proposed = product(*(range(len(axis.choices)) for axis in self.axes))
        for places in proposed if self.size <= trials else self._proposed(trials):
            self.point(places)

    def best(self) -> TunedPoint:
        """The choice of the goal, no worse than any neighbour. Raises ConfigError if no point keeps the bounds."""
        while True:
            points = self.points
            chosen = points[self._goal.choose([one.figures for one in points])]
            known = len(self._points)
            for places in self._neighbours(chosen.places):
                self.point(places)
            if len(self._points) == known and self._is_usable(chosen):
                return chosen

    def without(self, one: TunedPoint) -> Iterator[tuple[TuningAxis, TunedPoint | None]]:
        """Every axis on which the point differs from the present one, and the point with this change taken back."""
        for place, axis in enumerate(self.axes):
            if one.places[place]:
                yield axis, self.point((*one.places[:place], 0, *one.places[place + 1 :]))

    def _neighbours(self, places: Places) -> Iterator[Places]:
        """The points that differ on one axis."""
        for place, axis in enumerate(self.axes):
            for choice in range(len(axis.choices)):
                yield (*places[:place], choice, *places[place + 1 :])

    def _is_usable(self, one: TunedPoint) -> bool:
        """Whether `async-grpo run` would start it: its memory, for one, is checked only here."""
        try:
            plan_run(self._file, self._typed(one.overrides), download=False)
        except DependencyError:
            return True
        except ConfigError:
            if not any(one.places):
                raise
            self._unusable.add(one.places)
            return False
        return True

    def _typed(self, overrides: Overrides) -> list[str]:
        return [*self._overrides, *(f"{key}={value}" for key, value in overrides.items())]

    def _simulate(self, places: Places) -> TunedPoint:
        overrides = combined([axis.choices[place] for axis, place in zip(self.axes, places, strict=True)])
        config = load(self._file, self._typed(overrides))
        before = self.present.config.trainer.processes if self._points else config.trainer.processes
        timings = timings_for(self._timings, config, config.trainer.processes / before)
        settings = with_enough_steps(SimulatedSettings.from_config(config), timings)
        found = summarize_run(simulate(settings, timings, seed=self._seed))
        changed = self._changes(overrides)
        judged = PointFigures(
            tokens_per_s=found.tokens_per_s,
            age_mean=found.age_mean,
            ages={float(age): share for age, share in found.age_histogram.items()},
            max_staleness=config.max_staleness,
            devices=devices_of(config),
            changes=changed,
        )
        return TunedPoint(places, overrides, config, found, judged)

    def _changes(self, overrides: Overrides) -> int:
        present = combined([axis.choices[0] for axis in self.axes])
        return sum(present.get(key) != value for key, value in overrides.items())

    def _proposed(self, trials: int) -> Iterator[Places]:
        """So many proposals of Optuna, the present point first; the caller has simulated one when it asks for the
        next. Raises DependencyError without Optuna."""
        try:
            import optuna
        except ImportError:
            raise DependencyError(
                f"this space has {self.size} points, and choosing among them needs Optuna: pip install "
                f"'async-grpo[tune]'. Or simulate all of them: --trials {self.size}"
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=self._seed, n_startup_trials=STARTUP_TRIALS)
        study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
        study.enqueue_trial({axis.name: 0 for axis in self.axes})
        for _ in range(trials):
            trial = study.ask()
            places = tuple(trial.suggest_categorical(axis.name, [*range(len(axis.choices))]) for axis in self.axes)
            yield places
            one = self.point(places)
            if one is None:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, [self._goal.value(one.figures), one.figures.age_mean])


def timings_for(timings: Timings, config: RunConfig, ranks: float) -> Timings:
    """The timings for a configuration whose trainer has `ranks` times as many ranks: the time that depends on the
    tokens shrinks with them, the rest stays."""
    trainer = timings.trainer.model_copy(update={"token_s": timings.trainer.token_s / ranks})
    lengths = timings.lengths.with_default_cap(config.sampling.max_tokens)
    return timings.model_copy(update={"trainer": trainer, "lengths": lengths})


def devices_of(config: RunConfig) -> int:
    """Devices of both sides; on CPU, processes."""
    return config.rollout.servers * config.rollout.limits.devices + config.trainer.processes


def front_of(points: Sequence[TunedPoint], goal: Goal) -> list[TunedPoint]:
    """The points that no other beats in both value and mean age, the freshest first; those whose value is hardly above
    that of a fresher one are left out."""
    front: list[TunedPoint] = []
    for one in sorted(points, key=lambda one: (one.figures.age_mean, -goal.value(one.figures))):
        if not front or goal.value(one.figures) > (1 + FRONT_GAIN) * goal.value(front[-1].figures):
            front.append(one)
    return front
