"""report.md, sweep.json and the plots of a sweep, made only from the folders of its runs.

points.json, configs/, runs/NAME/  -->  PointMetrics  -->  GridSetting  -->  Recommendation  -->  files
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from async_grpo.app.report.summary import choose_score_format
from async_grpo.errors import ConfigError
from async_grpo.lab.sweep.folder import SweepFolder, SweepRecord
from async_grpo.lab.sweep.plots import write_plots
from async_grpo.lab.sweep.recommend import REWARD, Candidate, Recommendation, make_candidates, recommend
from async_grpo.lab.sweep.results import FINISHED, MIN_WINDOWS, PointMetrics, min_steady_steps, read_metrics
from async_grpo.lab.sweep.settings import GridSetting, format_values, group_by_setting
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
  The report of each run has the same values.
- **KL** is the divergence from the reference model, where there is one (`trainer.reference`).
- **Age** is the number of optimizer steps between generation and training of a token, mean / max (bound). **ESS** is
  the effective sample size of the importance weights, as a share of the tokens. **Clipped** is the share of the tokens
  that the loss clipped. **Gap** is the mean difference between engine and trainer in the log-probability of the same
  token under the same weights.
- Seconds of training exclude engine start-up; wall time includes it and the evaluations.
- The recommended setting trains the most samples per second among those whose learning is within the margin of the
  best. A setting is eligible if all of its seeds have finished, its group counts balance and its age bound was kept."""


class SweepComparison(msgspec.Struct, frozen=True, kw_only=True):
    """`sweep.json`: the metrics of every point, and the recommendation that follows from them."""

    format: int = FORMAT
    command: str
    axes: list[str]
    choice: Recommendation
    settings: list[Candidate]
    """The eligible settings."""
    points: list[PointMetrics]


def write_report(folder: SweepFolder, tolerance: float | None = None) -> SweepComparison:
    """Read every point's folder and write all files. Safe to repeat. Raises ConfigError if there is no sweep."""
    record = folder.read_record()
    if not record.points:
        missing = folder.record_file.name
        raise ConfigError(f"{folder.path} has no sweep ({missing} is missing). Give the folder of a sweep")
    points = read_point_metrics(folder, record)
    settings = group_by_setting(points)
    comparison = compare_settings(record, points, settings, tolerance)
    plots = write_plots(folder.path / "plots", settings, comparison.settings, comparison.choice)
    write_atomic(folder.path / "sweep.json", msgspec.json.format(msgspec.json.encode(comparison)).decode() + "\n")
    write_atomic(folder.path / "report.md", render_report(folder.path.name, comparison, settings, plots))
    return comparison


def read_point_metrics(folder: SweepFolder, record: SweepRecord) -> list[PointMetrics]:
    """Return the metrics of every point with the resolved values of every axis.

    A value that is a section, such as `{preset: dapo}`, is shown as typed: resolved, it would have all its defaults.
    """
    keys = axis_keys(record)
    metrics = []
    for point, point_record in zip(folder.load_points(record), record.points, strict=True):
        values = format_values(point.config.model_dump(mode="json"), keys)
        for key, value in point_record.values.items():
            if value.startswith("{"):
                values[key] = value
        metrics.append(read_metrics(point, values, error=point_record.error, at_once=point_record.at_once))
    return metrics


def axis_keys(record: SweepRecord) -> list[str]:
    """Return every key that a point sets, in the order of first use."""
    return list(dict.fromkeys(key for point in record.points for key in point.values))


def compare_settings(
    record: SweepRecord, points: Sequence[PointMetrics], settings: Sequence[GridSetting], tolerance: float | None
) -> SweepComparison:
    """Return the recommendation and the rest of sweep.json. Pure."""
    choice = recommend(settings, tolerance)
    eligible = [setting for setting in settings if setting.label not in choice.excluded]
    return SweepComparison(
        command=record.command,
        axes=axis_keys(record),
        choice=choice,
        settings=make_candidates(eligible, choice.measure or REWARD),
        points=list(points),
    )


def render_report(
    name: str, comparison: SweepComparison, settings: Sequence[GridSetting], plots: Sequence[Path]
) -> str:
    """Return the text of report.md."""
    pictures = [f"![{path.stem.replace('_', ' ')}](plots/{path.name})" for path in plots]
    sections = [
        f"# {name}",
        _render_recommendation(comparison.choice),
        *pictures[:1],
        _settings_table(settings, comparison),
        _axis_tables(settings),
        *pictures[1:],
        _points_table(comparison.points),
        _render_caveats(comparison),
        f"## How to read this\n\n{_READING.format(measure=f'the {comparison.choice.measure or REWARD}')}",
        f"## Reproduce\n\n{fenced(comparison.command)}",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _render_recommendation(choice: Recommendation) -> str:
    chosen = f"**Recommended: {choice.label}.** " if choice.label else "**No recommendation.** "
    within = f"\n\nWithin the margin: {'; '.join(choice.within)}." if len(choice.within) > 1 else ""
    return f"{chosen}{choice.reason}{within}"


def _settings_table(settings: Sequence[GridSetting], comparison: SweepComparison) -> str:
    candidates = {candidate.label: candidate for candidate in comparison.settings}
    chosen = comparison.choice.label
    score = "reward" if any(point.held_out_score == "reward" for point in comparison.points) else "accuracy"
    score_spec = choose_score_format(score)
    columns: dict[str, Callable[[GridSetting], str]] = {
        "setting": lambda setting: _format_label(setting.label, bold=setting.label == chosen),
        "seeds": lambda setting: f"{len(setting.finished)} of {len(setting.points)}",
        f"{score} before": _mean_column("accuracy_before", score_spec),
        "after": _mean_column("accuracy_after", score_spec),
        "learning": lambda setting: _format_learning(candidates.get(setting.label)),
        "reward, mean": _mean_column("reward_mean", ".3f"),
        "samples/s": _mean_column("samples_per_s", ",.3g"),
        "tokens/s": _mean_column("tokens_per_s", ",.0f"),
        "wall s": _mean_column("wall_s", ",.0f"),
        "trainer idle": _mean_column("trainer_idle", ".0%"),
        "rollout idle": _mean_column("rollout_idle", ".0%"),
        "age": _format_ages,
        "ESS": _mean_column("ess", ".3f"),
        "clipped": _mean_column("clip_fraction", ".2%"),
        "gap": _mean_column("logprob_gap_mean", ".1e"),
        "balanced": _format_balanced,
    }
    return f"## Settings (means over finished seeds)\n\n{_markdown_table(columns, settings)}"


def _axis_tables(settings: Sequence[GridSetting]) -> str:
    """Return a table per learning metric, with a column per value of the first axis; "" with a single axis."""
    firsts = list(dict.fromkeys(setting.first for setting in settings))
    rests = list(dict.fromkeys(setting.rest for setting in settings))
    if len(firsts) < 2 or len(rests) < 2:
        return ""

    setting_by_values = {(setting.rest, setting.first): setting for setting in settings}
    axis = next(iter(settings[0].values)).split(".")[-1]
    tables = []
    for key, (title, spec) in _BY_AXIS.items():
        if any(setting.values_of(key) for setting in settings):
            columns: dict[str, Callable[[str], str]] = {title: partial(_format_label, bold=False)}
            for first in firsts:
                columns[f"{axis}={first}"] = partial(_axis_cell, setting_by_values, key=key, spec=spec, first=first)
            tables.append(_markdown_table(columns, rests))
    return "\n\n".join([f"## By {axis} (mean over finished seeds ± one standard error)", *tables])


def _axis_cell(
    setting_by_values: Mapping[tuple[str, str], GridSetting], rest: str, *, first: str, key: str, spec: str
) -> str:
    setting = setting_by_values.get((rest, first))
    if setting is None:
        return ""
    text = figure(setting.mean(key), spec)
    error = setting.standard_error(key)
    if error is not None:
        text += f" ± {format(error, spec)}"
    if len(setting.finished) < len(setting.points):
        text += f" ({len(setting.finished)} of {len(setting.points)} seeds)"
    return text


def _mean_column(key: str, spec: str) -> Callable[[GridSetting], str]:
    return lambda setting: figure(setting.mean(key), spec)


def _format_label(label: str, *, bold: bool) -> str:
    escaped = label.replace("|", "\\|")
    return f"**{escaped}**" if bold else escaped


def _format_learning(candidate: Candidate | None) -> str:
    if candidate is None:
        return "-"
    if candidate.error is None:
        return f"{candidate.learning:.3f}"
    return f"{candidate.learning:.3f} ± {candidate.error:.3f}"


def _format_ages(setting: GridSetting) -> str:
    """Return mean / max (bound)."""
    mean_age = setting.mean("age_mean")
    max_ages = setting.values_of("age_max")
    bounds = setting.values_of("age_bound")
    if mean_age is None or not max_ages or not bounds:
        return "-"
    return f"{mean_age:.2f} / {max(max_ages):.0f} ({max(bounds):.0f})"


def _format_balanced(setting: GridSetting) -> str:
    if not setting.finished:
        return "-"
    return "yes" if all(point.balanced for point in setting.finished) else "**NO**"


def _points_table(points: Sequence[PointMetrics]) -> str:
    def link(point: PointMetrics) -> str:
        return f"[{point.name}](runs/{point.name}/report.md)" if point.state == FINISHED else point.name

    columns: dict[str, Callable[[PointMetrics], str]] = {
        "run": link,
        "seed": lambda point: str(point.seed),
        "state": lambda point: point.state,
        "steps": lambda point: f"{point.steps_done} of {point.steps}",
        "held-out, after": lambda point: figure(point.accuracy_after, choose_score_format(point.held_out_score)),
        "reward, last tenth": lambda point: figure(point.reward_last, ".3f"),
        "samples/s": lambda point: figure(point.samples_per_s, ",.3g"),
        "wall s": lambda point: figure(point.wall_s, ",.0f"),
        "at once": lambda point: str(point.at_once),
    }
    return f"## Points\n\n{_markdown_table(columns, points)}"


def find_caveats(comparison: SweepComparison) -> list[str]:
    """Return what a reader should know before trusting the recommendation, one or two sentences each."""
    caveats = [f"{label} is not eligible: {reason}." for label, reason in comparison.choice.excluded.items()]
    shared = max((point.at_once for point in comparison.points), default=1)
    if shared > 1:
        caveats.append(f"Up to {shared} runs shared this machine, which affects all times and throughputs.")

    short = [point for point in comparison.points if point.steps < min_steady_steps(point)]
    if short:
        steps = max(min_steady_steps(point) for point in short)
        caveats.append(
            f"Too short for their max_staleness S, with fewer than {MIN_WINDOWS} (S + 1) steps: "
            f"{', '.join(point.name for point in short)}. Such a run mostly trains groups generated before its first "
            f"step, so its throughput is not meaningful: sweep with steps={steps} or more."
        )
    if any(candidate.error is None for candidate in comparison.settings):
        caveats.append(
            "One seed per setting and no final evaluation give no standard error: repeat with --seeds 1,2,3."
        )
    return caveats


def _render_caveats(comparison: SweepComparison) -> str:
    """Return the caveats and the errors of points as Markdown."""
    lines = [f"- {caveat}" for caveat in find_caveats(comparison)]
    lines += [f"- {point.name} failed:\n\n{fenced(point.error)}\n" for point in comparison.points if point.error]
    return "## Caveats\n\n" + "\n".join(lines) if lines else ""


def _markdown_table(columns: Mapping[str, Callable[[T], str]], items: Sequence[T]) -> str:
    """Return a Markdown table with a row per item; `columns` maps headers to the function that formats a cell."""
    header = list(columns)
    rule = ["---", *["---:"] * (len(columns) - 1)]
    rows = [[format_cell(item) for format_cell in columns.values()] for item in items]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, rule, *rows])
