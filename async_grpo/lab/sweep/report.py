"""report.md, sweep.json and the plots of a sweep, made from the folders of its runs alone.

points.json, configs/, runs/NAME/  -->  PointMetrics  -->  GridSetting  -->  Recommendation  -->  files
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from async_grpo.app.report.summary import score_format
from async_grpo.errors import ConfigError
from async_grpo.lab.sweep.folder import SweepFolder, SweepRecord
from async_grpo.lab.sweep.plots import write_plots
from async_grpo.lab.sweep.recommend import REWARD, Candidate, Recommendation, candidate, recommend
from async_grpo.lab.sweep.results import FINISHED, WINDOWS, PointMetrics, least_steps, read_metrics
from async_grpo.lab.sweep.settings import GridSetting, settings_of, shown_values
from async_grpo.utils.files import write_atomic
from async_grpo.utils.text import fenced, figure

T = TypeVar("T")
FORMAT = 1

_BY_AXIS = {
    "accuracy_after": ("held-out, after", ".3f"),
    "accuracy_mean": ("held-out, mean over the run", ".3f"),
    "reward_mean": ("training reward, mean", ".3f"),
    "ess": ("ESS", ".3f"),
    "clip_fraction": ("clipped", ".3f"),
    "kl": ("KL, last tenth", ".3f"),
}
"""Field of PointMetrics -> title and format of its table."""

_READING = """\
- **Learning** is {measure}; ± is one standard error: the larger of the spread over the
  seeds and the sampling error of the evaluation (samples of one prompt count as one).
- **Throughput** is what the trainer consumed (samples and tokens) per second of its steps, waits included. The first
  S + 1 steps (at most half of all) are left out, because their data were generated before the clock started.
- **Idle**, as a share of the time of those steps: the trainer waited for a batch; a rollout server generated nothing.
  The report of each run has the same figures.
- **KL** is the divergence from the reference model, where there is one (`trainer.reference`).
- **Age** is the number of optimizer steps between generation and training of a token, mean / max (bound). **ESS** is
  the effective sample size of the importance weights, as a share of the tokens. **Clipped** is the share of the tokens
  that the loss clipped. **Gap** is the mean difference between engine and trainer in the log-probability of the same
  token under the same weights.
- Seconds of training leave out engine start-up; wall time includes it and the evaluations.
- The recommended setting trains the most samples per second among those whose learning is within the margin of the
  best. A setting counts if all of its seeds have finished, its group counts balance and its age bound was kept."""


class SweepComparison(msgspec.Struct, frozen=True, kw_only=True):
    """`sweep.json`: every figure of every point, and what follows from them."""

    format: int = FORMAT
    command: str
    axes: list[str]
    choice: Recommendation
    settings: list[Candidate]
    """The settings that count."""
    points: list[PointMetrics]


def write_report(folder: SweepFolder, tolerance: float | None = None) -> SweepComparison:
    """Read every point's folder and write all files; safe to repeat. Raises ConfigError if there is no sweep."""
    record = folder.read()
    if not record.points:
        missing = folder.record_file.name
        raise ConfigError(f"{folder.path} holds no sweep ({missing} is missing). Give the folder of one")
    figures = read_all(folder, record)
    settings = settings_of(figures)
    comparison = compare(record, figures, settings, tolerance)
    plots = write_plots(folder.path / "plots", settings, comparison.settings, comparison.choice)
    write_atomic(folder.path / "sweep.json", msgspec.json.format(msgspec.json.encode(comparison)).decode() + "\n")
    write_atomic(folder.path / "report.md", page(folder.path.name, comparison, settings, plots))
    return comparison


def read_all(folder: SweepFolder, record: SweepRecord) -> list[PointMetrics]:
    """The metrics of every point, with the resolved values of every axis; of a whole section, what was typed."""
    keys, found = axes_of(record), []
    for point, known in zip(folder.points(record), record.points, strict=True):
        sections = {key: value for key, value in known.values.items() if value.startswith("{")}
        values = shown_values(point.config.model_dump(mode="json"), keys) | sections
        found.append(read_metrics(point, values, error=known.error, at_once=known.at_once))
    return found


def axes_of(record: SweepRecord) -> list[str]:
    """Every key that a point sets, in the order of first use."""
    return list(dict.fromkeys(key for point in record.points for key in point.values))


def compare(
    record: SweepRecord, figures: Sequence[PointMetrics], settings: Sequence[GridSetting], tolerance: float | None
) -> SweepComparison:
    """The recommendation and what sweep.json holds, from the figures. Pure."""
    choice = recommend(settings, tolerance)
    counted = [setting for setting in settings if setting.label not in choice.excluded]
    candidates = [candidate(setting, choice.measure or REWARD) for setting in counted]
    return SweepComparison(
        command=record.command,
        axes=axes_of(record),
        choice=choice,
        settings=[one for one in candidates if one is not None],
        points=list(figures),
    )


def page(name: str, comparison: SweepComparison, settings: Sequence[GridSetting], plots: Sequence[Path]) -> str:
    """The text of report.md."""
    pictures = [f"![{path.stem.replace('_', ' ')}](plots/{path.name})" for path in plots]
    sections = [
        f"# {name}",
        _recommendation(comparison.choice),
        *pictures[:1],
        _settings_table(settings, comparison),
        _by_axis(settings),
        *pictures[1:],
        _points_table(comparison.points),
        _troubles(comparison),
        f"## How to read this\n\n{_READING.format(measure=f'the {comparison.choice.measure or REWARD}')}",
        f"## Reproduce\n\n{fenced(comparison.command)}",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _recommendation(choice: Recommendation) -> str:
    chosen = f"**Recommended: {choice.label}.** " if choice.label else "**No recommendation.** "
    within = f"\n\nWithin the margin: {'; '.join(choice.within)}." if len(choice.within) > 1 else ""
    return f"{chosen}{choice.reason}{within}"


def _settings_table(settings: Sequence[GridSetting], comparison: SweepComparison) -> str:
    learned, chosen = {one.label: one for one in comparison.settings}, comparison.choice.label
    score = "reward" if any(point.held_out_score == "reward" for point in comparison.points) else "accuracy"
    form = score_format(score)
    columns: dict[str, Callable[[GridSetting], str]] = {
        "setting": lambda setting: _name(setting.label, bold=setting.label == chosen),
        "seeds": lambda setting: f"{len(setting.finished)} of {len(setting.points)}",
        f"{score} before": _mean("accuracy_before", form),
        "after": _mean("accuracy_after", form),
        "learning": lambda setting: _learned(learned.get(setting.label)),
        "reward, mean": _mean("reward_mean", ".3f"),
        "samples/s": _mean("samples_per_s", ",.3g"),
        "tokens/s": _mean("tokens_per_s", ",.0f"),
        "wall s": _mean("wall_s", ",.0f"),
        "trainer idle": _mean("trainer_idle", ".0%"),
        "rollout idle": _mean("rollout_idle", ".0%"),
        "age": _ages,
        "ESS": _mean("ess", ".3f"),
        "clipped": _mean("clip_fraction", ".2%"),
        "gap": _mean("logprob_gap_mean", ".1e"),
        "balanced": _balanced,
    }
    return f"## Settings (means over finished seeds)\n\n{_table(columns, settings)}"


def _by_axis(settings: Sequence[GridSetting]) -> str:
    """With several axes, what matters for learning as small tables: a column for each value of the first axis."""
    firsts = list(dict.fromkeys(setting.first for setting in settings))
    rows = list(dict.fromkeys(setting.rest for setting in settings))
    if len(firsts) < 2 or len(rows) < 2:
        return ""
    at = {(setting.rest, setting.first): setting for setting in settings}
    axis = next(iter(settings[0].values)).split(".")[-1]
    texts = []
    for key, (title, form) in _BY_AXIS.items():
        if any(setting.values_of(key) for setting in settings):
            columns: dict[str, Callable[[str], str]] = {title: lambda rest: _name(rest, bold=False)}
            for first in firsts:
                columns[f"{axis}={first}"] = partial(_cell, at, key=key, form=form, first=first)
            texts.append(_table(columns, rows))
    return "\n\n".join([f"## By {axis} (mean over finished seeds ± one standard error)", *texts])


def _cell(at: Mapping[tuple[str, str], GridSetting], rest: str, *, first: str, key: str, form: str) -> str:
    setting = at.get((rest, first))
    if setting is None:
        return ""
    error, done = setting.standard_error(key), len(setting.finished)
    spread = "" if error is None else f" ± {format(error, form)}"
    missing = "" if done == len(setting.points) else f" ({done} of {len(setting.points)} seeds)"
    return f"{figure(setting.mean(key), form)}{spread}{missing}"


def _mean(key: str, form: str) -> Callable[[GridSetting], str]:
    return lambda setting: figure(setting.mean(key), form)


def _name(label: str, *, bold: bool) -> str:
    name = label.replace("|", "\\|")
    return f"**{name}**" if bold else name


def _learned(one: Candidate | None) -> str:
    if one is None:
        return "-"
    return f"{one.learning:.3f}" if one.error is None else f"{one.learning:.3f} ± {one.error:.3f}"


def _ages(setting: GridSetting) -> str:
    mean, oldest, bounds = setting.mean("age_mean"), setting.values_of("age_max"), setting.values_of("age_bound")
    if mean is None or not oldest or not bounds:
        return "-"
    return f"{mean:.2f} / {max(oldest):.0f} ({max(bounds):.0f})"


def _balanced(setting: GridSetting) -> str:
    if not setting.finished:
        return "-"
    return "yes" if all(point.balanced for point in setting.finished) else "**NO**"


def _points_table(points: Sequence[PointMetrics]) -> str:
    columns: dict[str, Callable[[PointMetrics], str]] = {
        "run": lambda one: f"[{one.name}](runs/{one.name}/report.md)" if one.state == FINISHED else one.name,
        "seed": lambda one: str(one.seed),
        "state": lambda one: one.state,
        "steps": lambda one: f"{one.steps_done} of {one.steps}",
        "held-out, after": lambda one: figure(one.accuracy_after, score_format(one.held_out_score)),
        "reward, last tenth": lambda one: figure(one.reward_last, ".3f"),
        "samples/s": lambda one: figure(one.samples_per_s, ",.3g"),
        "wall s": lambda one: figure(one.wall_s, ",.0f"),
        "at once": lambda one: str(one.at_once),
    }
    return f"## Points\n\n{_table(columns, points)}"


def caveats_of(comparison: SweepComparison) -> list[str]:
    """What a reader should know before trusting the recommendation, a sentence or two each."""
    found = [f"{label} does not count: {why}." for label, why in comparison.choice.excluded.items()]
    shared = max((point.at_once for point in comparison.points), default=1)
    if shared > 1:
        found.append(f"Up to {shared} runs shared this machine, which affects all times and throughputs.")
    short = [point for point in comparison.points if point.steps < least_steps(point)]
    if short:
        steps = max(least_steps(point) for point in short)
        found.append(
            f"Too short for their max_staleness S, with fewer than {WINDOWS} (S + 1) steps: "
            f"{', '.join(point.name for point in short)}. Most of what such a run trains was generated before its "
            f"first step, so its throughput means little: sweep with steps={steps} or more."
        )
    if any(one.error is None for one in comparison.settings):
        found.append("One seed per setting and no final evaluation give no standard error: repeat with --seeds 1,2,3.")
    return found


def _troubles(comparison: SweepComparison) -> str:
    """Markdown: the caveats, and the errors of points."""
    lines = [f"- {caveat}" for caveat in caveats_of(comparison)]
    lines += [f"- {point.name} failed:\n\n{fenced(point.error)}\n" for point in comparison.points if point.error]
    return "## Caveats\n\n" + "\n".join(lines) if lines else ""


def _table(columns: Mapping[str, Callable[[T], str]], items: Sequence[T]) -> str:
    """Markdown: a row for each item; `columns` gives the header and the cell of every column."""
    rule = ["---", *["---:"] * (len(columns) - 1)]
    rows = [[read(item) for read in columns.values()] for item in items]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [list(columns), rule, *rows])
