"""Simulates points of the search space, each once, and finds the best.

A small space is simulated completely. In a larger one, Optuna's multi-objective TPE sampler proposes points that are
fast or fresh (Bergstra et al. 2011; Ozaki et al., GECCO 2020). Then the neighbours of the best point are simulated
until none is better, so the choice is at least a local optimum on every axis.
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
from async_grpo.lab.tune.goals import CandidateMetrics, Goal
from async_grpo.lab.tune.space import Overrides, TuningAxis, merge_choices

MIN_FRONT_GAIN = 0.005
"""Minimum gain, as a fraction, of a point on the Pareto front over the fresher ones."""
STARTUP_TRIALS = 20
"""Points that the sampler draws at random before it models them."""

Choices = tuple[int, ...]
"""A point: the index of its choice on every axis. All 0 is the present configuration."""


@dataclass(frozen=True, slots=True)
class TunedPoint:
    """A simulated point."""

    choices: Choices
    overrides: Overrides
    config: RunConfig
    simulated: SimulatedMetrics
    metrics: CandidateMetrics
    """The part of `simulated` by which the point is judged."""

    def with_measurement(self, measured: MeasuredMetrics) -> CandidateMetrics:
        """Metrics by a real run. The distribution of ages is not measured, so the simulated one is shifted to the
        measured mean."""
        shift = measured.age_mean - self.metrics.age_mean
        ages = {age + shift: fraction for age, fraction in self.metrics.ages.items()}
        return replace(self.metrics, tokens_per_s=measured.tokens_per_s, age_mean=measured.age_mean, ages=ages)


class TuningSearch:
    """Simulates points of a space around a configuration."""

    def __init__(
        self, file: Path, overrides: Sequence[str], axes: Sequence[TuningAxis], timings: Timings, goal: Goal, seed: int
    ) -> None:
        self._file = file
        self._overrides = overrides
        self._timings = timings
        self._goal = goal
        self._seed = seed
        self.axes = axes
        self._points: dict[Choices, TunedPoint | None] = {}
        """Simulated points. None: the configuration is invalid, or the run would stall."""
        self._unusable: set[Choices] = set()
        """Points that can be simulated, but that `async-grpo run` would refuse."""

        present_choices = (0,) * len(axes)
        self._present_ranks = load(file, overrides).trainer.processes
        self.present = self._simulate(present_choices)
        self._points[present_choices] = self.present

    @property
    def size(self) -> int:
        """Number of points of the space."""
        return math.prod(len(axis.choices) for axis in self.axes)

    @property
    def points(self) -> list[TunedPoint]:
        """All points that were simulated and can be run, the present one first."""
        return [point for point in self._points.values() if point is not None and point.choices not in self._unusable]

    def simulate_point(self, choices: Choices) -> TunedPoint | None:
        """Simulate a point, at most once. None if its configuration is invalid or it would stall."""
        if choices not in self._points:
            try:
                self._points[choices] = self._simulate(choices)
            except ConfigError:
                self._points[choices] = None
        return self._points[choices]

    def explore(self, trials: int) -> None:
        """Simulate all points if there are at most `trials`, otherwise `trials` proposed ones."""
        if self.size <= trials:
            for choices in product(*(range(len(axis.choices)) for axis in self.axes)):
                self.simulate_point(choices)
        else:
            self._simulate_proposals(trials)

    def find_best(self) -> TunedPoint:
        """Return the goal's choice, after simulating its neighbours. Raises ConfigError if no point is in bounds."""
        while True:
            points = self.points
            best = points[self._goal.choose_point([point.metrics for point in points])]
            simulated_before = len(self._points)
            for choices in self._neighbours(best.choices):
                self.simulate_point(choices)
            # A new neighbour may be better, and an unusable point leaves `points`: choose again.
            if len(self._points) == simulated_before and self._check_usable(best):
                return best

    def simulate_reverts(self, point: TunedPoint) -> Iterator[tuple[TuningAxis, TunedPoint | None]]:
        """Yield every axis on which the point differs from the present one, and the point with that change reverted."""
        for index, axis in enumerate(self.axes):
            if point.choices[index]:
                reverted = (*point.choices[:index], 0, *point.choices[index + 1 :])
                yield axis, self.simulate_point(reverted)

    def _neighbours(self, choices: Choices) -> Iterator[Choices]:
        """Points that differ on one axis, and the point itself."""
        for index, axis in enumerate(self.axes):
            for choice in range(len(axis.choices)):
                yield (*choices[:index], choice, *choices[index + 1 :])

    def _check_usable(self, point: TunedPoint) -> bool:
        """Plan the run of a point, which checks its memory, for example. Notes it as unusable if that fails.

        Only for points about to be chosen: planning takes much longer than loading the configuration.
        """
        try:
            plan_run(self._file, self._all_overrides(point.overrides), download=False)
        except DependencyError:
            return True  # a package is missing here; it may be installed where the run will be
        except ConfigError:
            if point is self.present:
                raise
            self._unusable.add(point.choices)
            return False
        return True

    def _all_overrides(self, overrides: Overrides) -> list[str]:
        return [*self._overrides, *(f"{key}={value}" for key, value in overrides.items())]

    def _simulate(self, choices: Choices) -> TunedPoint:
        overrides = merge_choices([axis.choices[choice] for axis, choice in zip(self.axes, choices, strict=True)])
        config = load(self._file, self._all_overrides(overrides))
        timings = adapt_timings(self._timings, config, config.trainer.processes / self._present_ranks)
        settings = with_enough_steps(SimulatedSettings.from_config(config), timings)
        simulated = summarize_run(simulate(settings, timings, seed=self._seed))
        metrics = CandidateMetrics(
            tokens_per_s=simulated.tokens_per_s,
            age_mean=simulated.age_mean,
            ages={float(age): fraction for age, fraction in simulated.age_histogram.items()},
            max_staleness=config.max_staleness,
            devices=count_devices(config),
            changes=self._count_changes(overrides),
        )
        return TunedPoint(choices, overrides, config, simulated, metrics)

    def _count_changes(self, overrides: Overrides) -> int:
        present = merge_choices([axis.choices[0] for axis in self.axes])
        return sum(present.get(key) != value for key, value in overrides.items())

    def _simulate_proposals(self, trials: int) -> None:
        """Simulate points that Optuna proposes, the present one first. Raises DependencyError without Optuna."""
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
            choices = tuple(trial.suggest_categorical(axis.name, [*range(len(axis.choices))]) for axis in self.axes)
            point = self.simulate_point(choices)
            if point is None:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, [self._goal.value(point.metrics), point.metrics.age_mean])


def adapt_timings(timings: Timings, config: RunConfig, rank_ratio: float) -> Timings:
    """Adapt timings to a configuration whose trainer has `rank_ratio` times as many ranks.

    The time per token shrinks with the ranks, the rest stays.
    """
    trainer = timings.trainer.model_copy(update={"token_s": timings.trainer.token_s / rank_ratio})
    lengths = timings.lengths.with_default_cap(config.sampling.max_tokens)
    return timings.model_copy(update={"trainer": trainer, "lengths": lengths})


def count_devices(config: RunConfig) -> int:
    """Number of devices of both sides; on CPU, of processes."""
    return config.rollout.servers * config.rollout.limits.devices + config.trainer.processes


def find_pareto_front(points: Sequence[TunedPoint], goal: Goal) -> list[TunedPoint]:
    """Points that no other beats in both value and mean age, the freshest first.

    Points that are hardly better than a fresher one are left out.
    """
    front: list[TunedPoint] = []
    for point in sorted(points, key=lambda point: (point.metrics.age_mean, -goal.value(point.metrics))):
        if not front or goal.value(point.metrics) > (1 + MIN_FRONT_GAIN) * goal.value(front[-1].metrics):
            front.append(point)
    return front
