"""`async-grpo tune`: from the options to a recommendation and its files.

DIR/recommended.yaml   the configuration, with a reason for every changed line
DIR/tune.json          all simulated points, and the measured metrics
DIR/plots/pareto.png   speed against mean age
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
from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError, DataError
from async_grpo.lab.simulate.calibrate import MeasuredMetrics, measure_run
from async_grpo.lab.simulate.prediction import TimingsOptions
from async_grpo.lab.simulate.recorded import read_recorded
from async_grpo.lab.simulate.results import transient_steps, with_enough_steps
from async_grpo.lab.simulate.settings import SimulatedSettings
from async_grpo.lab.simulate.timings import Timings
from async_grpo.lab.simulate.uncertainty import Uncertainty, describe_uncertainty
from async_grpo.lab.sweep.folder import SweepFolder
from async_grpo.lab.sweep.plan import Point, SweepPlan, point_name
from async_grpo.lab.sweep.report import read_point_metrics
from async_grpo.lab.sweep.settings import group_by_setting
from async_grpo.lab.sweep.sweep import INTERRUPTED, SweepOptions, run_sweep
from async_grpo.lab.tune.advice import Advice, as_json, explain_changes, list_changes, render_recommended_yaml
from async_grpo.lab.tune.goals import AGE_COST, Goal, GoalName, measure_age_cost, measure_ess_decay
from async_grpo.lab.tune.search import Choices, TunedPoint, TuningSearch, adapt_timings
from async_grpo.lab.tune.space import build_axes
from async_grpo.utils.files import write_atomic

REAL_STEPS = 16
"""Default number of measured steps per short real run."""
_WITHOUT_EVALUATION = ("eval.prompts=1", "eval.samples=1", "eval.greedy=false", "eval.every_steps=0")
"""Overrides of short real runs, which measure speed and not learning."""


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


def tune(options: TuneOptions, report_progress: Callable[[str], None]) -> tuple[Path, Advice]:
    """Search the settings and write the files. Returns their folder and the recommendation.

    Must not be called in a running event loop. Raises ConfigError for invalid options, before anything is run, and if
    no point is within the bounds; DataError for runs whose files hold too little.
    """
    base = plan_run(options.config, options.overrides, download=False).config
    goal, goal_notes = _make_goal(options)
    axes = build_axes(base, options.vary, options.fix)
    timings, quality_notes, uncertainty = options.timings.read_timings(base)
    notes: list[str] = []

    def add_note(text: str) -> None:
        notes.append(text)
        report_progress(text)

    for text in (timings.source, *quality_notes, *goal_notes):
        add_note(text)

    search = TuningSearch(options.config, options.overrides, axes, timings, goal, options.seed)
    search.explore(options.trials)
    chosen = search.find_best()
    report_progress(f"simulated {len(search.points)} of {search.size} points: {', '.join(axis.name for axis in axes)}")

    folder = options.out or base.runs_dir / f"{base.name}-tune"
    measured: dict[Choices, MeasuredMetrics] = {}
    if options.real:
        measured, failures = _run_best_points(SweepFolder(folder), options, base.name, search, goal, chosen)
        notes += failures
        chosen = _choose_measured(search.points, measured, goal)

    if chosen.choices not in measured:
        for text in _extrapolation_notes(options.timings.runs, chosen):
            add_note(text)
    # The uncertainty does not include how timings depend on the number of ranks.
    if uncertainty is not None and chosen.config.trainer.processes == base.trainer.processes:
        add_note(_describe_range(chosen.config, timings, uncertainty, options.seed))
    add_note(f"chosen: {goal.rule}")

    reasons = explain_changes(search, goal, chosen)
    advice = Advice(goal, search.points, search.present, chosen, reasons, measured, notes)
    write_files(folder, options, advice)
    return folder, advice


def write_files(folder: Path, options: TuneOptions, advice: Advice) -> None:
    """Write the files of a recommendation."""
    save_figures(folder / "plots", {"pareto": advice.figure()})
    write_atomic(folder / "tune.json", as_json(advice))
    text = render_recommended_yaml(options.config, options.overrides, advice, options.command)
    write_atomic(folder / "recommended.yaml", text)


def _make_goal(options: TuneOptions) -> tuple[Goal, list[str]]:
    """Build the goal, and describe its measured or assumed constants."""
    ess_decay = options.ess_decay
    if options.min_ess is not None and ess_decay is None:
        ess_decay = measure_ess_decay([read_recorded(path) for path in options.timings.runs])
        if ess_decay is None:
            raise ConfigError(
                "--min-ess needs the decay of the effective sample size with age. Add a run with --from that trained "
                "tokens of other ages than 0, or set --ess-decay D for exp(-D * age)"
            )

    age_cost = options.age_cost
    if options.learning is not None:
        folder = SweepFolder(options.learning)
        record = folder.read_record()
        age_cost = measure_age_cost(group_by_setting(read_point_metrics(folder, record)) if record.points else [])

    goal = Goal(
        options.goal,
        options.max_age,
        options.min_ess,
        AGE_COST if age_cost is None else age_cost,
        ess_decay or 0.0,
    )
    notes = goal.describe_assumptions(
        age_cost_measured=options.learning is not None, ess_decay_measured=options.ess_decay is None
    )
    return goal, notes


# Notes on the choice


def _extrapolation_notes(runs: Sequence[Path], chosen: TunedPoint) -> list[str]:
    """Caution against more samples in flight than in any run that the timings were fitted to."""
    recorded_slots = [Run.open(path).config.rollout.max_concurrency for path in runs]
    if not recorded_slots or chosen.config.rollout.max_concurrency <= max(recorded_slots):
        return []
    return [
        f"extrapolated: the runs had at most {max(recorded_slots)} samples in flight. Check by a short run: --real 1"
    ]


def _describe_range(config: RunConfig, timings: Timings, uncertainty: Uncertainty, seed: int) -> str:
    settings = with_enough_steps(SimulatedSettings.from_config(config), timings)
    predicted = uncertainty.predict_range(settings, adapt_timings(timings, config, 1.0), seed=seed)
    certainty = describe_uncertainty([predicted], uncertainty)
    return f"recommended: between {predicted.low:,.0f} and {predicted.high:,.0f} tokens/s, {certainty}"


# Short real runs


def _run_best_points(
    folder: SweepFolder, options: TuneOptions, name: str, search: TuningSearch, goal: Goal, chosen: TunedPoint
) -> tuple[dict[Choices, MeasuredMetrics], list[str]]:
    """Do short real runs of the present point and the best others, as a sweep in `folder`.

    Returns the measured metrics, and a line per run that failed. Raises DataError if all failed.
    """
    points = [search.present, *_select_best(search, goal, chosen, options.real)]
    planned = {point.choices: _plan_short_run(folder, options, name, point, search.present) for point in points}
    plan = SweepPlan(list(planned.values()), frozenset(point.name for point in planned.values()))
    request = SweepOptions(options.config, [], None, options.overrides, folder.path, command=options.command)
    if asyncio.run(run_sweep(folder, plan, request, show=lambda *_: None)) == INTERRUPTED:
        raise SystemExit(INTERRUPTED)

    measured: dict[Choices, MeasuredMetrics] = {}
    failures: list[str] = []
    for choices, point in planned.items():
        if not point.is_finished:
            log_file = folder.log_file(point.name)
            failures.append(f"the run {point.name} does not count: it has not finished, see {log_file}")
            continue
        try:
            measured[choices] = measure_run(read_recorded(point.config.run_dir))
        except (ConfigError, DataError) as error:
            failures.append(f"the run {point.name} does not count: {error}")
    if not measured:
        raise DataError(f"no short run has ended successfully. See the logs in {folder.path}/logs")
    return measured, failures


def _select_best(search: TuningSearch, goal: Goal, chosen: TunedPoint, count: int) -> list[TunedPoint]:
    """Select the chosen point and the best others within the bounds, without the present one."""
    others = [
        point
        for point in search.points
        if point not in (chosen, search.present) and goal.is_within_bounds(point.metrics)
    ]
    others.sort(key=lambda point: goal.value(point.metrics), reverse=True)
    return [point for point in [chosen, *others] if point is not search.present][:count]


def _plan_short_run(
    folder: SweepFolder, options: TuneOptions, name: str, point: TunedPoint, present: TunedPoint
) -> Point:
    values = list_changes(point, present)
    steps = options.real_steps + transient_steps(point.config.max_staleness)
    overrides = [
        *options.overrides,
        *(f"{key}={value}" for key, value in values.items()),
        *_WITHOUT_EVALUATION,
        f"steps={steps}",
    ]
    config = plan_run(options.config, overrides, download=True).config
    update = {"name": point_name(name, values, point.config.seed), "runs_dir": folder.runs_dir}
    return Point(values, config.model_copy(update=update))


def _choose_measured(points: Sequence[TunedPoint], measured: dict[Choices, MeasuredMetrics], goal: Goal) -> TunedPoint:
    """Choose among the points that were run, by their measured metrics."""
    candidates = [point for point in points if point.choices in measured]
    metrics = [point.with_measurement(measured[point.choices]) for point in candidates]
    return candidates[goal.choose_point(metrics)]
