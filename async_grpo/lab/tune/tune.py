"""`async-grpo tune`: from the options to a recommendation and its files.

DIR/recommended.yaml   the configuration, with a reason for every line that it changes
DIR/tune.json          every simulated point, and what was measured
DIR/plots/pareto_front.png   speed against mean age
DIR/points.json, runs/, report.md, ...   with --real: the short runs, as a sweep
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from async_grpo.app.launch.plan import plan_run
from async_grpo.app.report.drawing import save_figures
from async_grpo.app.runs.run import Run
from async_grpo.errors import ConfigError, DataError
from async_grpo.lab.simulate.calibrate import MeasuredMetrics, measure_run
from async_grpo.lab.simulate.prediction import TimingsOptions
from async_grpo.lab.simulate.recorded import read_recorded
from async_grpo.lab.simulate.results import transient_steps, with_enough_steps
from async_grpo.lab.simulate.settings import SimulatedSettings
from async_grpo.lab.simulate.uncertainty import describe_uncertainty
from async_grpo.lab.sweep.folder import SweepFolder
from async_grpo.lab.sweep.plan import Point, SweepPlan, point_name
from async_grpo.lab.sweep.report import read_point_metrics
from async_grpo.lab.sweep.settings import group_by_setting
from async_grpo.lab.sweep.sweep import INTERRUPTED, SweepOptions, run_sweep
from async_grpo.lab.tune.advice import Advice, as_json, changes_of, reasons_for, recommended_yaml
from async_grpo.lab.tune.goals import AGE_COST, Goal, GoalName, measured_age_cost, measured_ess_decay
from async_grpo.lab.tune.search import Places, TunedPoint, TuningSearch, timings_for
from async_grpo.lab.tune.space import axes_of
from async_grpo.utils.files import write_atomic

REAL_STEPS = 16
"""Steps of a short real run that count, unless told otherwise."""
_SHORT = ("eval.prompts=1", "eval.samples=1", "eval.greedy=false", "eval.every_steps=0")
"""Overrides of short real runs: what they learn is of no interest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """The options of the command, as typed."""

    config: Path
    timings: TimingsOptions
    overrides: Sequence[str] = ()
    vary: Sequence[str] = ()
    fix: Sequence[str] = ()
    goal: GoalName = "throughput"
    max_age: float | None = None
    min_ess: float | None = None
    age_cost: float | None = None
    ess_decay: float | None = None
    learning: Path | None = None
    trials: int = 200
    seed: int = 1
    real: int = 0
    real_steps: int = REAL_STEPS
    out: Path | None = None
    command: str = "async-grpo tune"


def tune(options: TuneOptions, say: Callable[[str], None]) -> tuple[Path, Advice]:
    """The folder that was written and the recommendation. Must not be called in a running event loop.

    Raises ConfigError for options that are wrong, before anything is run, and if no point keeps the bounds; DataError
    for runs that say too little.
    """
    base = plan_run(options.config, options.overrides, download=False).config
    goal, notes = _goal_of(options)
    axes = axes_of(base, options.vary, options.fix)
    timings, said, uncertainty = options.timings.read_timings(base)
    notes = [timings.source, *said, *notes]
    for line in notes:
        say(line)
    search = TuningSearch(options.config, options.overrides, axes, timings, goal, options.seed)
    search.explore(options.trials)
    chosen = search.best()
    say(f"simulated {len(search.points)} of {search.size} points: {', '.join(axis.name for axis in axes)}")
    folder = options.out or base.runs_dir / f"{base.name}-tune"
    measured: dict[Places, MeasuredMetrics] = {}
    if options.real:
        best = _best(search, goal, chosen, options.real)
        measured, failed = _run(SweepFolder(folder), options, base.name, [search.present, *best], search.present)
        notes += failed
        ran = [one for one in search.points if one.places in measured]
        chosen = ran[goal.choose([one.measured(measured[one.places]) for one in ran])]
    beyond = [] if chosen.places in measured else _beyond(options.timings.runs, chosen)
    for line in beyond:
        say(line)
    notes += beyond
    if uncertainty is not None and chosen.config.trainer.processes == base.trainer.processes:
        settings = with_enough_steps(SimulatedSettings.from_config(chosen.config), timings)
        span = uncertainty.predict_range(settings, timings_for(timings, chosen.config, 1.0), seed=options.seed)
        determined = describe_uncertainty([span], uncertainty)
        notes.append(f"recommended: between {span.low:,.0f} and {span.high:,.0f} tokens/s, {determined}")
        say(notes[-1])
    notes.append(f"chosen: {goal.rule}")
    say(notes[-1])
    advice = Advice(goal, search.points, search.present, chosen, reasons_for(search, goal, chosen), measured, notes)
    write(folder, options, advice)
    return folder, advice


def write(folder: Path, options: TuneOptions, advice: Advice) -> None:
    """Write the files of a recommendation."""
    save_figures(folder / "plots", {"pareto_front": advice.figure()})
    write_atomic(folder / "tune.json", as_json(advice))
    text = recommended_yaml(options.config, options.overrides, advice, options.command)
    write_atomic(folder / "recommended.yaml", text)


def _goal_of(options: TuneOptions) -> tuple[Goal, list[str]]:
    """The goal, and what it assumes or has measured, in words."""
    decay, cost = options.ess_decay, options.age_cost
    if options.min_ess is not None and decay is None:
        decay = measured_ess_decay([read_recorded(path) for path in options.timings.runs])
        if decay is None:
            raise ConfigError(
                "--min-ess needs to know how the effective sample size falls with age: give a run that trained tokens "
                "of other ages than 0 with --from, or --ess-decay D for exp(-D * age)"
            )
    if options.learning is not None:
        folder = SweepFolder(options.learning)
        record = folder.read_record()
        cost = measured_age_cost(group_by_setting(read_point_metrics(folder, record)) if record.points else [])
    cost = AGE_COST if cost is None else cost
    goal = Goal(options.goal, options.max_age, options.min_ess, cost, decay or 0.0)
    measured = {"learning_measured": options.learning is not None, "ess_measured": options.ess_decay is None}
    return goal, goal.assumptions(**measured)


def _beyond(runs: Sequence[Path], chosen: TunedPoint) -> list[str]:
    """A caution if more samples are in flight than in any run that the timings were fitted to."""
    known = max((Run.open(path).config.rollout.max_concurrency for path in runs), default=None)
    if known is None or chosen.config.rollout.max_concurrency <= known:
        return []
    return [f"extrapolated: the runs had at most {known} samples in flight. Check by a short run: --real 1"]


def _best(search: TuningSearch, goal: Goal, chosen: TunedPoint, count: int) -> list[TunedPoint]:
    """The chosen point and the best others that keep the bounds; never the present one."""
    others = [one for one in search.points if one not in (chosen, search.present) and goal.allows(one.figures)]
    ranked = sorted(others, key=lambda one: goal.value(one.figures), reverse=True)
    return [one for one in [chosen, *ranked] if one is not search.present][:count]


def _run(
    folder: SweepFolder, options: TuneOptions, name: str, points: Sequence[TunedPoint], present: TunedPoint
) -> tuple[dict[Places, MeasuredMetrics], list[str]]:
    """Do short real runs of the points, as a sweep in `folder`; returns what was measured and which failed."""
    planned: dict[Places, Point] = {}
    for one in points:
        values = changes_of(one, present)
        own = point_name(name, values, one.config.seed)
        steps = f"steps={options.real_steps + transient_steps(one.config.max_staleness)}"
        typed = [*options.overrides, *(f"{key}={value}" for key, value in values.items()), *_SHORT, steps]
        config = plan_run(options.config, typed, download=True).config
        update = {"name": own, "runs_dir": folder.runs_dir}
        planned[one.places] = Point(values, config.model_copy(update=update))
    plan = SweepPlan(list(planned.values()), frozenset(point.name for point in planned.values()))
    request = SweepOptions(options.config, [], None, options.overrides, folder.path, command=options.command)
    if asyncio.run(run_sweep(folder, plan, request, show=lambda *_: None)) == INTERRUPTED:
        raise SystemExit(INTERRUPTED)
    measured, failed = {}, []
    for places, point in planned.items():
        if not point.is_finished:
            failed.append(
                f"the run {point.name} does not count: it has not finished, see {folder.log_file(point.name)}"
            )
            continue
        try:
            measured[places] = measure_run(read_recorded(point.config.run_dir))
        except (ConfigError, DataError) as error:
            failed.append(f"the run {point.name} does not count: {error}")
    if not measured:
        raise DataError(f"no short run has ended as it should; {folder.path}/logs says why")
    return measured, failed
