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
from async_grpo.app.report.drawing import BLUE, GREEN, GREY, ORANGE, legend_above, new_figure, percent, save_figures
from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError
from async_grpo.lab.simulate.calibrate import calibrate, measure
from async_grpo.lab.simulate.devices import estimate
from async_grpo.lab.simulate.recorded import RecordedRun, read_recorded
from async_grpo.lab.simulate.results import SimulatedMetrics, summarize_run, with_enough_steps
from async_grpo.lab.simulate.settings import SimulatedSettings
from async_grpo.lab.simulate.simulation import simulate
from async_grpo.lab.simulate.timings import Timings
from async_grpo.lab.simulate.uncertainty import (
    PredictedRange,
    Uncertainty,
    baseline_of,
    uncertainty_of_estimate,
    uncertainty_of_runs,
)
from async_grpo.lab.simulate.whatif import Change
from async_grpo.lab.sweep.plan import assignments, combinations, parse_axis

if TYPE_CHECKING:
    from matplotlib.figure import Figure


NO_RANGE = "how sure these timings are is not known: predictions have no range. --from RUN and --device NAME give one"
ROUGH_ERROR = 0.3
ROUGH = "these timings are rough: the run is short, or its machine did other things too. A longer run tells more"


@dataclass(frozen=True, slots=True)
class Prediction:
    """One point: a choice of values and what the simulation says of it."""

    label: str
    settings: SimulatedSettings
    figures: SimulatedMetrics
    range: PredictedRange | None = None


@dataclass(frozen=True, slots=True)
class TimingsOptions:
    """Where timings come from, as typed: exactly one."""

    runs: Sequence[Path]
    device: str | None
    file: Path | None

    def read(self, config: RunConfig) -> tuple[Timings, list[str]]:
        """The timings, and lines that say how good they are. Raises ConfigError, DataError."""
        timings, lines, _ = self.read_with_uncertainty(config)
        return timings, lines

    def read_with_uncertainty(self, config: RunConfig) -> tuple[Timings, list[str], Uncertainty | None]:
        """The same, and what may be otherwise; None for a file, which does not say how sure it is."""
        if bool(self.runs) + (self.device is not None) > 1 or not (self.runs or self.device or self.file):
            raise ConfigError(
                "a simulation needs timings from one place: --from runs/NAME (a run of this project, may be repeated), "
                "--device NAME (an estimate), or --timings FILE. A file may also replace some timings of the other two"
            )
        if self.runs:
            recorded = [read_recorded(path) for path in self.runs]
            timings, lines = calibrated(recorded)
            return self._replaced(timings), lines, uncertainty_of_runs(recorded, self._replaced(timings))
        if self.device is not None:
            timings = self._replaced(estimate(config, self.device))
            return timings, [timings.source], uncertainty_of_estimate(timings)
        assert self.file is not None
        return Timings.read(self.file), [NO_RANGE], None

    def _replaced(self, timings: Timings) -> Timings:
        """The timings with what the file says instead."""
        return timings if self.file is None else Timings.read(self.file, base=timings)


@dataclass(frozen=True, slots=True)
class CheckedRuns:
    """What a simulation says of a run that was made, or of several repetitions of one, beside what was measured."""

    runs: Sequence[RecordedRun]
    simulated: SimulatedMetrics
    baseline: float | None = None
    """Tokens/s by a + b / (S + 1), fitted to the runs that were calibrated on."""

    @property
    def label(self) -> str:
        """The runs, and what they have in common."""
        config = self.runs[0].config
        times = f" x {len(self.runs)}" if len(self.runs) > 1 else ""
        return f"{self.runs[0].path.name}{times}, S = {config.max_staleness}"

    @property
    def tokens_per_s(self) -> list[float]:
        """Measured, of every repetition."""
        return [measure(run).tokens_per_s for run in self.runs]

    @property
    def age_mean(self) -> list[float]:
        """Measured, of every repetition, in optimizer steps."""
        return [measure(run).age_mean for run in self.runs]

    @property
    def speed_error(self) -> float:
        """Simulated tokens/s over the mean of those measured, minus 1."""
        return self.simulated.tokens_per_s / fmean(self.tokens_per_s) - 1

    @property
    def age_error(self) -> float:
        """Simulated mean age minus the measured one, in optimizer steps."""
        return self.simulated.age_mean - fmean(self.age_mean)


def compare(
    recorded: Sequence[RecordedRun], timings: Timings, *, seed: int = 1, fitted_to: Sequence[RecordedRun] = ()
) -> list[CheckedRuns]:
    """Simulate runs that were made, with these timings; runs of the same settings are repetitions of one. `fitted_to`:
    runs to which the baseline is fitted as well."""
    found: dict[SimulatedSettings, list[RecordedRun]] = {}
    for run in recorded:
        found.setdefault(SimulatedSettings.from_config(run.config), []).append(run)
    speeds = [measure(run).tokens_per_s for run in fitted_to]
    return [
        CheckedRuns(
            runs,
            summarize_run(simulate(settings, timings, seed=seed)),
            baseline_of(fitted_to, speeds, settings.max_staleness),
        )
        for settings, runs in found.items()
    ]


def table_of_comparisons(comparisons: Sequence[CheckedRuns]) -> Table:
    """Simulated and measured figures; of repetitions the mean and half the range."""
    table = Table(title="simulated and measured", title_justify="left", box=SIMPLE)
    table.add_column("run", overflow="fold")
    has_baseline = any(one.baseline is not None for one in comparisons)
    for column in ("tokens/s", "measured", "error", "age", "measured", "error"):
        table.add_column(column, justify="right")
    if has_baseline:
        table.add_column("a + b / (S + 1)", justify="right")
    for one in comparisons:
        speed = f"{one.simulated.tokens_per_s:,.0f}", _speed(one.tokens_per_s), f"{one.speed_error:+.1%}"
        age = f"{one.simulated.age_mean:.2f}", _age(one.age_mean), f"{one.age_error:+.2f}"
        baseline = [] if one.baseline is None else [f"{one.baseline / fmean(one.tokens_per_s) - 1:+.1%}"]
        table.add_row(one.label, *speed, *age, *baseline)
    return table


def _speed(values: Sequence[float]) -> str:
    mean = fmean(values)
    return f"{mean:,.0f}" + (f" ±{(max(values) - min(values)) / 2 / mean:.1%}" if len(values) > 1 else "")


def _age(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f}" + (f" ±{(max(values) - min(values)) / 2:.2f}" if len(values) > 1 else "")


def calibrated(recorded: Sequence[RecordedRun]) -> tuple[Timings, list[str]]:
    """Timings fitted to runs, and lines that say how well, against each of these runs."""
    found = calibrate(recorded)
    said = [
        f"trainer: a step's computing is off by {found.trainer_error:.1%} in the mean; "
        f"engine: a group's time by {found.engine_error:.1%}",
        *(f"not known: {note}" for note in found.notes),
        *([ROUGH] if max(found.trainer_error, found.engine_error) > ROUGH_ERROR else []),
    ]
    for one in compare(recorded, found.timings):
        said.append(
            f"{one.label}: {one.simulated.tokens_per_s:,.0f} tokens/s simulated, {_speed(one.tokens_per_s)} "
            f"measured ({one.speed_error:+.1%}); mean age {one.simulated.age_mean:.2f} simulated, "
            f"{_age(one.age_mean)} measured{_evaluations_of(one)}"
        )
    return found.timings, said


def _evaluations_of(one: CheckedRuns) -> str:
    measured = [seconds for run in one.runs for seconds in measure(run).evaluations_s]
    if one.simulated.evaluation_s is None or not measured:
        return ""
    return f"; an evaluation {one.simulated.evaluation_s:.1f} s simulated, {fmean(measured):.1f} s measured"


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
    """Simulate a configuration, or every point of a grid around it. Raises ConfigError."""
    found = []
    for values in combinations([parse_axis(text) for text in grid]):
        typed = assignments(values)
        config = plan_run(file, [*overrides, *typed], download=False).config
        settings = SimulatedSettings.from_config(config)
        settings = with_enough_steps(settings, timings) if steps is None else settings.with_steps(steps)
        own = timings.model_copy(update={"lengths": timings.lengths.with_default_cap(config.sampling.max_tokens)})
        label = ", ".join(typed) or config.name
        span = None if uncertainty is None else uncertainty.range_of(settings, own, seed=seed)
        found.append(Prediction(label, settings, summarize_run(simulate(settings, own, seed=seed)), span))
    return found


def show(predictions: Sequence[Prediction], compared: Sequence[CheckedRuns], changes: Sequence[Change]) -> None:
    """Print the tables that have rows; with changes also what the first prediction waits for."""
    console = Console()
    console.print(table_of(predictions))
    if changes:
        console.print(predictions[0].figures.bottleneck, highlight=False)
        console.print(table_of_changes(changes))
    if compared:
        console.print(table_of_comparisons(compared))


def table_of(predictions: Sequence[Prediction]) -> Table:
    """The figures of all points, one a row."""
    table = Table(title="simulated", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("point", overflow="fold", min_width=10)
    has_ranges = any(one.range is not None for one in predictions)
    between = ["between"] if has_ranges else []
    for column in ("tokens/s", *between, "step", "trainer idle", "servers idle", "age (max)", "wasted"):
        least = len(max(column.split(), key=len))
        table.add_column(column, justify="right", min_width=least, overflow="fold")
    for one in predictions:
        figures = one.figures
        span = [f"{one.range.low:,.0f} to {one.range.high:,.0f}"] if one.range is not None else between
        table.add_row(
            one.label,
            f"{figures.tokens_per_s:,.0f}",
            *span,
            f"{figures.step_s:.3g} s",
            f"{figures.trainer_idle:.0%}",
            f"{figures.rollout_idle:.0%}",
            f"{figures.age_mean:.2f} ({figures.age_max})",
            f"{figures.wasted:.0%}",
        )
    return table


def table_of_changes(found: Sequence[Change]) -> Table:
    """What one change would give, the best first."""
    table = Table(title="what one change would give", title_justify="left", box=SIMPLE)
    table.add_column("change", min_width=24, overflow="fold")
    for column in ("tokens/s", "trainer idle", "servers idle", "age"):
        table.add_column(column, justify="right")
    for change in found:
        figures = change.figures
        idle = (f"{figures.trainer_idle:.0%}", f"{figures.rollout_idle:.0%}")
        label = change.label + (f" ({change.key})" if change.key else "")
        table.add_row(label, f"{change.speedup - 1:+.0%}", *idle, f"{figures.age_mean:.2f}")
    return table


def as_plain(
    predictions: Sequence[Prediction], timings: Timings, comparisons: Sequence[CheckedRuns] = ()
) -> dict[str, object]:
    """All figures and the timings, as JSON takes them."""
    points = [
        {"point": one.label, **asdict(one.figures), "range": None if one.range is None else asdict(one.range)}
        for one in predictions
    ]
    checks = [
        {
            "runs": [str(run.path) for run in one.runs],
            "simulated": asdict(one.simulated),
            "tokens_per_s": one.tokens_per_s,
            "age_mean": one.age_mean,
            "baseline": one.baseline,
        }
        for one in comparisons
    ]
    return {"timings": timings.model_dump(mode="json"), "points": points, "checks": checks}


def draw(predictions: Sequence[Prediction], folder: Path) -> list[Path]:
    """Write simulation.png into the folder: speed, idle shares and ages of all points."""
    return save_figures(folder, {"simulation": _figure(predictions)})


def _figure(predictions: Sequence[Prediction]) -> Figure:
    figure, (speed, idle, ages) = new_figure(3, 1, (8, 8))
    places = range(len(predictions))
    figures = [one.figures for one in predictions]
    speed.bar(places, [one.tokens_per_s for one in figures], color=BLUE)
    speed.set_title("tokens per second", loc="left", fontweight="bold")
    idle.bar(
        [place - 0.2 for place in places], [one.trainer_idle for one in figures], 0.4, color=ORANGE, label="trainer"
    )
    idle.bar(
        [place + 0.2 for place in places], [one.rollout_idle for one in figures], 0.4, color=GREEN, label="servers"
    )
    idle.set_title("idle share", loc="left", fontweight="bold")
    percent(idle)
    legend_above(idle)
    ages.bar(places, [one.age_mean for one in figures], color=GREY, label="mean")
    ages.plot(places, [one.age_max for one in figures], "k_", markersize=14, label="largest")
    ages.set_title("age in optimizer steps", loc="left", fontweight="bold")
    legend_above(ages)
    for axes in (speed, idle, ages):
        axes.set_xticks(list(places), [one.label for one in predictions] if axes is ages else [""] * len(predictions))
    ages.tick_params("x", rotation=30 if len(predictions) > 4 else 0)
    return figure
