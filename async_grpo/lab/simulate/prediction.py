"""`async-grpo simulate`: a configuration and timings in, tables and plots out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from async_grpo.app.launch.plan import plan_run
from async_grpo.app.report.drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    format_y_as_percent,
    make_figure,
    place_legend_above,
    save_figures,
)
from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError
from async_grpo.lab.simulate.calibrate import calibrate, measure_run
from async_grpo.lab.simulate.devices import estimate_timings
from async_grpo.lab.simulate.recorded import RecordedRun, read_recorded
from async_grpo.lab.simulate.results import SimulatedMetrics, summarize_run, with_enough_steps
from async_grpo.lab.simulate.settings import SimulatedSettings
from async_grpo.lab.simulate.simulation import simulate
from async_grpo.lab.simulate.timings import Timings
from async_grpo.lab.simulate.uncertainty import (
    PredictedRange,
    Uncertainty,
    predict_by_baseline,
    uncertainty_of_estimate,
    uncertainty_of_runs,
)
from async_grpo.lab.simulate.whatif import Change
from async_grpo.lab.sweep.plan import assignments, combinations, parse_axis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NO_RANGE = "predictions have no range: the uncertainty of a timings file is unknown. Use --from RUN or --device NAME"
ROUGH_ERROR = 0.3
"""Error of a fit, as a fraction, above which timings are called rough."""
ROUGH = "these timings are rough: the run is short, or its machine was busy. Use a longer run"


@dataclass(frozen=True, slots=True)
class Prediction:
    """One point of a grid, and its simulated metrics."""

    label: str
    settings: SimulatedSettings
    metrics: SimulatedMetrics
    range: PredictedRange | None = None


@dataclass(frozen=True, slots=True)
class TimingsOptions:
    """The source of timings, as typed: runs, a device, or a file. A file may also change timings of the other two."""

    runs: Sequence[Path]
    device: str | None
    file: Path | None

    def read_timings(self, config: RunConfig) -> tuple[Timings, list[str], Uncertainty | None]:
        """Read, fit or estimate the timings.

        Also returns lines about their quality, and their uncertainty; None for a file, whose uncertainty is unknown.
        Raises ConfigError, DataError.
        """
        has_several = bool(self.runs) and self.device is not None
        has_none = not (self.runs or self.device or self.file)
        if has_several or has_none:
            raise ConfigError(
                "a simulation needs timings from one place: --from runs/NAME (a run of this project, may be repeated), "
                "--device NAME (an estimate), or --timings FILE. A file may also replace some timings of the other two"
            )

        if self.runs:
            recorded = [read_recorded(path) for path in self.runs]
            calibrated, lines = calibrate_and_check(recorded)
            timings = self._apply_file(calibrated)
            return timings, lines, uncertainty_of_runs(recorded, timings)
        if self.device is not None:
            timings = self._apply_file(estimate_timings(config, self.device))
            return timings, [timings.source], uncertainty_of_estimate(timings)
        assert self.file is not None
        return Timings.read(self.file), [NO_RANGE], None

    def _apply_file(self, timings: Timings) -> Timings:
        return timings if self.file is None else Timings.read(self.file, base=timings)


# Predictions


def predict(
    file: Path,
    overrides: Sequence[str],
    grid: Sequence[str],
    timings: Timings,
    *,
    steps: int | None,
    seed: int,
    uncertainty: Uncertainty | None = None,
) -> list[Prediction]:
    """Simulate a configuration, or every point of a grid around it.

    `steps`: number of steps to simulate. None: as many as the metrics need. Raises ConfigError.
    """
    predictions: list[Prediction] = []
    for values in combinations([parse_axis(text) for text in grid]):
        point_overrides = assignments(values)
        config = plan_run(file, [*overrides, *point_overrides], download=False).config
        settings = SimulatedSettings.from_config(config)
        settings = with_enough_steps(settings, timings) if steps is None else settings.with_steps(steps)
        lengths = timings.lengths.with_default_cap(config.sampling.max_tokens)
        point_timings = timings.model_copy(update={"lengths": lengths})

        predicted_range = None
        if uncertainty is not None:
            predicted_range = uncertainty.predict_range(settings, point_timings, seed=seed)
        metrics = summarize_run(simulate(settings, point_timings, seed=seed))
        label = ", ".join(point_overrides) or config.name
        predictions.append(Prediction(label, settings, metrics, predicted_range))
    return predictions


# Comparison with recorded runs


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Simulated metrics of a recorded run, or of several repetitions of one, next to the measured ones."""

    runs: Sequence[RecordedRun]
    simulated: SimulatedMetrics
    baseline: float | None = None
    """Tokens/s by a + b / (S + 1), fitted to the runs of the calibration."""

    @property
    def label(self) -> str:
        """Name of the run, number of repetitions, and S."""
        config = self.runs[0].config
        times = f" x {len(self.runs)}" if len(self.runs) > 1 else ""
        return f"{self.runs[0].path.name}{times}, S = {config.max_staleness}"

    @property
    def tokens_per_s(self) -> list[float]:
        """Measured tokens/s of each repetition."""
        return [measure_run(run).tokens_per_s for run in self.runs]

    @property
    def age_mean(self) -> list[float]:
        """Measured mean age of each repetition, in optimizer steps."""
        return [measure_run(run).age_mean for run in self.runs]

    @property
    def speed_error(self) -> float:
        """Simulated tokens/s divided by the mean of the measured ones, minus 1."""
        return self.simulated.tokens_per_s / fmean(self.tokens_per_s) - 1

    @property
    def age_error(self) -> float:
        """Simulated mean age minus the measured one, in optimizer steps."""
        return self.simulated.age_mean - fmean(self.age_mean)


def compare_with_runs(
    recorded: Sequence[RecordedRun], timings: Timings, *, seed: int = 1, fitted_to: Sequence[RecordedRun] = ()
) -> list[RunComparison]:
    """Simulate recorded runs with these timings. Runs with the same settings count as repetitions of one.

    `fitted_to`: runs of the calibration, to which the baseline is fitted as well.
    """
    runs_by_settings: dict[SimulatedSettings, list[RecordedRun]] = {}
    for run in recorded:
        runs_by_settings.setdefault(SimulatedSettings.from_config(run.config), []).append(run)

    speeds = [measure_run(run).tokens_per_s for run in fitted_to]
    comparisons: list[RunComparison] = []
    for settings, runs in runs_by_settings.items():
        metrics = summarize_run(simulate(settings, timings, seed=seed))
        baseline = predict_by_baseline(fitted_to, speeds, settings.max_staleness)
        comparisons.append(RunComparison(runs, metrics, baseline))
    return comparisons


def calibrate_and_check(recorded: Sequence[RecordedRun]) -> tuple[Timings, list[str]]:
    """Fit timings to runs, and simulate the same runs with them. Returns the timings and lines about their errors."""
    calibration = calibrate(recorded)
    lines = [
        f"trainer: mean error of a step's computing time {calibration.trainer_error:.1%}; "
        f"engine: of a group's time {calibration.engine_error:.1%}"
    ]
    lines += [f"unknown: {note}" for note in calibration.notes]
    if max(calibration.trainer_error, calibration.engine_error) > ROUGH_ERROR:
        lines.append(ROUGH)

    for comparison in compare_with_runs(recorded, calibration.timings):
        simulated = comparison.simulated
        line = (
            f"{comparison.label}: {simulated.tokens_per_s:,.0f} tokens/s simulated, "
            f"{_format_speeds(comparison.tokens_per_s)} measured ({comparison.speed_error:+.1%}); "
            f"mean age {simulated.age_mean:.2f} simulated, {_format_ages(comparison.age_mean)} measured"
        )
        evaluations_s = [seconds for run in comparison.runs for seconds in measure_run(run).evaluations_s]
        if simulated.evaluation_s is not None and evaluations_s:
            line += f"; an evaluation {simulated.evaluation_s:.1f} s simulated, {fmean(evaluations_s):.1f} s measured"
        lines.append(line)
    return calibration.timings, lines


# Output


def print_tables(
    predictions: Sequence[Prediction], comparisons: Sequence[RunComparison], changes: Sequence[Change]
) -> None:
    """Print the tables that have rows, and with changes the bottleneck of the first prediction."""
    console = Console()
    console.print(make_prediction_table(predictions))
    if changes:
        console.print(predictions[0].metrics.bottleneck, highlight=False)
        console.print(make_change_table(changes))
    if comparisons:
        console.print(make_comparison_table(comparisons))


def make_prediction_table(predictions: Sequence[Prediction]) -> Table:
    """Make a table with a row per point."""
    has_ranges = any(prediction.range is not None for prediction in predictions)
    columns = ["tokens/s", "step", "trainer idle", "servers idle", "age (max)", "wasted"]
    if has_ranges:
        columns.insert(1, "between")

    table = Table(title="simulated", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("point", overflow="fold", min_width=10)
    for column in columns:
        longest_word = max(column.split(), key=len)
        table.add_column(column, justify="right", min_width=len(longest_word), overflow="fold")

    for prediction in predictions:
        metrics = prediction.metrics
        cells = [
            f"{metrics.tokens_per_s:,.0f}",
            f"{metrics.step_s:.3g} s",
            f"{metrics.trainer_idle:.0%}",
            f"{metrics.rollout_idle:.0%}",
            f"{metrics.age_mean:.2f} ({metrics.age_max})",
            f"{metrics.wasted:.0%}",
        ]
        if has_ranges:
            limits = prediction.range
            cells.insert(1, "" if limits is None else f"{limits.low:,.0f} to {limits.high:,.0f}")
        table.add_row(prediction.label, *cells)
    return table


def make_change_table(changes: Sequence[Change]) -> Table:
    """Make a table of the simulated effect of single changes, in their order."""
    table = Table(title="effect of single changes", title_justify="left", box=SIMPLE)
    table.add_column("change", min_width=24, overflow="fold")
    for column in ("tokens/s", "trainer idle", "servers idle", "age"):
        table.add_column(column, justify="right")
    for change in changes:
        metrics = change.metrics
        table.add_row(
            f"{change.label} ({change.key})" if change.key else change.label,
            f"{change.speedup - 1:+.0%}",
            f"{metrics.trainer_idle:.0%}",
            f"{metrics.rollout_idle:.0%}",
            f"{metrics.age_mean:.2f}",
        )
    return table


def make_comparison_table(comparisons: Sequence[RunComparison]) -> Table:
    """Make a table of simulated and measured metrics. Repetitions show the mean and half the range."""
    has_baseline = any(comparison.baseline is not None for comparison in comparisons)
    table = Table(title="simulated and measured", title_justify="left", box=SIMPLE)
    table.add_column("run", overflow="fold")
    for column in ("tokens/s", "measured", "error", "age", "measured", "error"):
        table.add_column(column, justify="right")
    if has_baseline:
        table.add_column("a + b / (S + 1)", justify="right")

    for comparison in comparisons:
        cells = [
            f"{comparison.simulated.tokens_per_s:,.0f}",
            _format_speeds(comparison.tokens_per_s),
            f"{comparison.speed_error:+.1%}",
            f"{comparison.simulated.age_mean:.2f}",
            _format_ages(comparison.age_mean),
            f"{comparison.age_error:+.2f}",
        ]
        if comparison.baseline is not None:
            cells.append(f"{comparison.baseline / fmean(comparison.tokens_per_s) - 1:+.1%}")
        table.add_row(comparison.label, *cells)
    return table


def _format_speeds(values: Sequence[float]) -> str:
    mean = fmean(values)
    if len(values) == 1:
        return f"{mean:,.0f}"
    return f"{mean:,.0f} ±{(max(values) - min(values)) / 2 / mean:.1%}"


def _format_ages(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{fmean(values):.2f}"
    return f"{fmean(values):.2f} ±{(max(values) - min(values)) / 2:.2f}"


def as_plain(
    predictions: Sequence[Prediction], timings: Timings, comparisons: Sequence[RunComparison] = ()
) -> dict[str, object]:
    """Convert all metrics and the timings to values for JSON."""
    points: list[dict[str, object]] = []
    for prediction in predictions:
        limits = None if prediction.range is None else asdict(prediction.range)
        points.append({"point": prediction.label, **asdict(prediction.metrics), "range": limits})

    checks: list[dict[str, object]] = []
    for comparison in comparisons:
        checks.append(
            {
                "runs": [str(run.path) for run in comparison.runs],
                "simulated": asdict(comparison.simulated),
                "tokens_per_s": comparison.tokens_per_s,
                "age_mean": comparison.age_mean,
                "baseline": comparison.baseline,
            }
        )
    return {"timings": timings.model_dump(mode="json"), "points": points, "checks": checks}


def save_plot(predictions: Sequence[Prediction], folder: Path) -> list[Path]:
    """Write simulation.png into the folder: speed, idle shares and ages of all points. Returns the paths."""
    return save_figures(folder, {"simulation": _plot_predictions(predictions)})


def _plot_predictions(predictions: Sequence[Prediction]) -> Figure:
    figure, (speed_axes, idle_axes, age_axes) = make_figure(3, 1, (8, 8))
    metrics = [prediction.metrics for prediction in predictions]
    positions = range(len(predictions))

    speed_axes.bar(positions, [point.tokens_per_s for point in metrics], color=BLUE)
    speed_axes.set_title("tokens per second", loc="left", fontweight="bold")

    trainer_idle = [point.trainer_idle for point in metrics]
    rollout_idle = [point.rollout_idle for point in metrics]
    idle_axes.bar([position - 0.2 for position in positions], trainer_idle, 0.4, color=ORANGE, label="trainer")
    idle_axes.bar([position + 0.2 for position in positions], rollout_idle, 0.4, color=GREEN, label="servers")
    idle_axes.set_title("idle share", loc="left", fontweight="bold")
    format_y_as_percent(idle_axes)
    place_legend_above(idle_axes)

    age_axes.bar(positions, [point.age_mean for point in metrics], color=GREY, label="mean")
    age_axes.plot(positions, [point.age_max for point in metrics], "k_", markersize=14, label="largest")
    age_axes.set_title("age in optimizer steps", loc="left", fontweight="bold")
    place_legend_above(age_axes)

    for axes in (speed_axes, idle_axes):
        axes.set_xticks(list(positions), [""] * len(predictions))
    age_axes.set_xticks(list(positions), [prediction.label for prediction in predictions])
    age_axes.tick_params("x", rotation=30 if len(predictions) > 4 else 0)
    return figure
