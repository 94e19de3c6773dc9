"""report.md, sweep.json and the plots of a sweep, made from the folders of its runs alone.

points.json, configs/, runs/NAME/  -->  PointMetrics  -->  GridSetting  -->  Recommendation  -->  files
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from async_grpo.app.sweep.folder import SweepFolder, SweepRecord
from async_grpo.app.sweep.plots import write_plots
from async_grpo.app.sweep.recommend import REWARD, Candidate, Recommendation, candidate, recommend
from async_grpo.app.sweep.results import FINISHED, PointMetrics, read_metrics
from async_grpo.app.sweep.settings import GridSetting, SeedStatistic, settings_of, shown_values
from async_grpo.errors import ConfigError
from async_grpo.utils.files import write_atomic
from async_grpo.utils.text import fenced

FORMAT = 1
_WINDOWS = 4
"""A run shorter than this many windows of S + 1 steps does not reach its usual pace."""

_READING = """\
- **Learning** is {measure}; ± is one standard error: the larger of the spread over the
  seeds and the sampling error of the evaluation (samples of one prompt count as one).
- **Throughput** is what the trainer consumed, over the seconds of its steps, waits included: samples and tokens. The
  first S + 1 steps (half of all, at most) are left out: what they train was generated before the clock started.
- **Idle**: trainer, the share of the same steps that it waited for a batch; rollout, the share of the trainer's time in
  which a server generated nothing.
- **Age**: how many optimizer steps old trained tokens were, mean / max (bound). **ESS**: effective sample size of the
  importance weights, as a share of the tokens. **Clipped**: share of the tokens that the loss clipped. **Gap**: mean
  difference between engine and trainer in the log-probability of the same token under the same weights.
- Seconds of training leave out the start of the engines; wall time has it, and the evaluations, too.
- Recommended is the setting that trains most samples a second among those whose learning is within the margin of the
  best. A setting counts if every seed of it has finished, its books balance and its bound on ages was kept."""


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
        raise ConfigError(
            f"{folder.path} holds no sweep ({folder.record_file.name} is missing). Give the folder of one"
        )
    figures = read_all(folder, record)
    settings = settings_of(figures)
    comparison = compare(record, figures, settings, tolerance)
    plots = write_plots(folder.path / "plots", settings, comparison.settings, comparison.choice)
    write_atomic(folder.path / "sweep.json", msgspec.json.format(msgspec.json.encode(comparison)).decode() + "\n")
    write_atomic(folder.path / "report.md", page(folder.path.name, comparison, settings, plots))
    return comparison


def read_all(folder: SweepFolder, record: SweepRecord) -> list[PointMetrics]:
    """The metrics of every point, with the resolved values of every axis."""
    keys = axes_of(record)
    return [
        read_metrics(
            point,
            shown_values(point.config.model_dump(mode="json"), keys),
            error=known.error,
            at_once=known.at_once,
        )
        for point, known in zip(folder.points(record), record.points, strict=True)
    ]


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
    sections = [
        f"# {name}",
        _recommendation(comparison.choice),
        *[f"![{path.stem.replace('_', ' ')}](plots/{path.name})" for path in plots[:1]],
        _settings_table(settings, comparison),
        *[f"![{path.stem.replace('_', ' ')}](plots/{path.name})" for path in plots[1:]],
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
    learned = {one.label: one for one in comparison.settings}
    head = [
        *("setting", "seeds", "accuracy before", "after", "learning", "reward, mean", "samples/s", "tokens/s"),
        *("wall s", "trainer idle", "rollout idle", "age", "ESS", "clipped", "gap", "balanced"),
    ]
    rows = [_settings_row(setting, learned.get(setting.label), comparison.choice) for setting in settings]
    return f"## Settings (means over finished seeds)\n\n{_table(head, rows)}"


def _settings_row(setting: GridSetting, learned: Candidate | None, choice: Recommendation) -> list[str]:
    def mean(figure: Callable[[PointMetrics], float | None], form: str) -> str:
        return _mean(setting.measure(figure), form)

    bold = "**" if setting.label == choice.label else ""
    return [
        f"{bold}{_cell(setting.label)}{bold}",
        f"{len(setting.finished)} of {len(setting.points)}",
        mean(lambda point: point.accuracy_before, ".1%"),
        mean(lambda point: point.accuracy_after, ".1%"),
        _learned(learned),
        mean(lambda point: point.reward_mean, ".3f"),
        mean(lambda point: point.samples_per_s, ",.3g"),
        mean(lambda point: point.tokens_per_s, ",.0f"),
        mean(lambda point: point.wall_s, ",.0f"),
        mean(lambda point: point.trainer_idle, ".0%"),
        mean(lambda point: point.rollout_idle, ".0%"),
        _ages(setting),
        mean(lambda point: point.ess, ".3f"),
        mean(lambda point: point.clip_fraction, ".2%"),
        mean(lambda point: point.logprob_gap_mean, ".1e"),
        _balanced(setting.finished),
    ]


def _learned(one: Candidate | None) -> str:
    if one is None:
        return "-"
    return f"{one.learning:.3f}" if one.error is None else f"{one.learning:.3f} ± {one.error:.3f}"


def _ages(setting: GridSetting) -> str:
    mean, oldest = setting.measure(lambda point: point.age_mean), setting.measure(lambda point: point.age_max)
    bound = setting.measure(lambda point: point.age_bound)
    if mean is None or oldest is None or bound is None:
        return "-"
    return f"{mean.mean:.2f} / {oldest.high:.0f} ({bound.high:.0f})"


def _balanced(points: Sequence[PointMetrics]) -> str:
    if not points:
        return "-"
    return "yes" if all(point.balanced for point in points) else "**NO**"


def _points_table(points: Sequence[PointMetrics]) -> str:
    head = ["run", "seed", "state", "steps", "accuracy after", "reward, last tenth", "samples/s", "wall s", "at once"]
    rows = [
        [
            f"[{point.name}](runs/{point.name}/report.md)" if point.state == FINISHED else point.name,
            str(point.seed),
            point.state,
            f"{point.steps_done} of {point.steps}",
            _figure(point.accuracy_after, ".1%"),
            _figure(point.reward_last, ".3f"),
            _figure(point.samples_per_s, ",.3g"),
            _figure(point.wall_s, ",.0f"),
            str(point.at_once),
        ]
        for point in points
    ]
    return f"## Points\n\n{_table(head, rows)}"


def _troubles(comparison: SweepComparison) -> str:
    """What a reader should know before believing the figures."""
    lines = [f"- {label} does not count: {why}." for label, why in comparison.choice.excluded.items()]
    lines += [f"- {point.name} failed:\n\n{fenced(point.error)}\n" for point in comparison.points if point.error]
    shared = max((point.at_once for point in comparison.points), default=1)
    if shared > 1:
        lines.append(f"- Up to {shared} runs shared this machine: times and throughputs are those of a shared machine.")
    short = [p.name for p in comparison.points if p.age_bound is not None and p.steps < _WINDOWS * (p.age_bound + 1)]
    if short:
        lines.append(
            f"- Fewer steps than {_WINDOWS} windows of S + 1: {', '.join(short)}. Most of what such a run trains is "
            "its head start, so its throughput says little: sweep with more steps."
        )
    if any(one.error is None for one in comparison.settings):
        lines.append("- One seed a setting, and no evaluation at the end, gives no error: repeat with --seeds 1,2,3.")
    return "## Mind\n\n" + "\n".join(lines) if lines else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, rule, *rows])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _mean(measure: SeedStatistic | None, form: str) -> str:
    return "-" if measure is None else format(measure.mean, form)


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
