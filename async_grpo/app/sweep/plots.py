"""The plots of a sweep: PNG files in DIR/plots.

The colour shows the value of the first axis; line and marker show those of the other axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.app.report.drawing import GREY, RED, new_figure, save_figures
from async_grpo.app.sweep.recommend import Candidate, Recommendation
from async_grpo.app.sweep.settings import Band, GridSetting, band

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINES, _MARKERS = ("-", "--", ":", "-."), ("o", "s", "^", "D")
_COLUMNS = 3

_PANELS = {
    "samples_per_s": "trained samples per second",
    "tokens_per_s": "trained tokens per second",
    "trainer_idle": "trainer idle",
    "rollout_idle": "rollout servers idle",
    "age_mean": "age of the trained tokens, mean",
    "age_max": "age of the trained tokens, max",
    "ess": "effective sample size",
    "clip_fraction": "clipped tokens",
    "logprob_gap_mean": "log-probability gap, mean",
}
"""Field of PointMetrics -> title of its panel."""


@dataclass(frozen=True, slots=True)
class LineStyle:
    """How a setting is drawn in every plot."""

    color: Any
    line: str
    marker: str


def write_plots(
    folder: Path, settings: Sequence[GridSetting], candidates: Sequence[Candidate], choice: Recommendation
) -> list[Path]:
    """Draw every plot for which there are data; returns the files in the order of the report."""
    counted = [setting for setting in settings if setting.finished]
    styles = styles_of(counted)
    figures = {
        "tradeoff": _tradeoff(candidates, {setting.label: setting for setting in counted}, styles, choice),
        "reward_by_step": _rewards(counted, styles, over_seconds=False),
        "reward_by_time": _rewards(counted, styles, over_seconds=True),
        "figures": _figures(counted, styles),
    }
    return save_figures(folder, figures)


def styles_of(settings: Sequence[GridSetting]) -> dict[str, LineStyle]:
    """Label -> style: a colour for each value of the first axis, a line for each combination of the others."""
    from matplotlib import colormaps

    firsts = list(dict.fromkeys(_first(setting) for setting in settings))
    rests = list(dict.fromkeys(_rest(setting) for setting in settings))
    styles = {}
    for setting in settings:
        place = firsts.index(_first(setting)) / max(1, len(firsts) - 1)
        style = rests.index(_rest(setting)) % len(_LINES)
        styles[setting.label] = LineStyle(colormaps["viridis"](0.9 * place), _LINES[style], _MARKERS[style])
    return styles


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other point beats in both coordinates, sorted by the first.

    >>> pareto([(1, 3), (2, 2), (1.5, 1), (3, 1)])
    [(1, 3), (2, 2), (3, 1)]
    """
    front: list[tuple[float, float]] = []
    for point in sorted(set(points), reverse=True):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return front[::-1]


def _tradeoff(
    candidates: Sequence[Candidate],
    settings: dict[str, GridSetting],
    styles: dict[str, LineStyle],
    choice: Recommendation,
) -> Figure | None:
    """Learning against speed; up and to the right is better. Points show their values, the title the keys."""
    if not candidates:
        return None
    figure, [axes] = new_figure(1, 1, (8, 4.4))
    keys = [key.split(".")[-1] for key in settings[candidates[0].label].values]
    axes.set_title(f"Learning against throughput, by {', '.join(keys)}", loc="left", fontweight="bold")
    front = pareto([(one.samples_per_s, one.learning) for one in candidates])
    axes.plot(*zip(*front, strict=True), color=GREY, linewidth=1, linestyle="--", zorder=1, label="not beaten in both")
    for one in candidates:
        style = styles[one.label]
        at = (one.samples_per_s, one.learning)
        axes.errorbar(*at, yerr=one.error, color=style.color, marker=style.marker, markersize=7, capsize=3)
        values = ", ".join(settings[one.label].values.values())
        axes.annotate(values, at, (8, 6), textcoords="offset points", fontsize=8)
        if one.label == choice.label:
            ring: dict[str, Any] = {"facecolors": "none", "edgecolors": RED, "linewidths": 2, "label": "recommended"}
            axes.scatter(*at, s=220, zorder=3, **ring)
    axes.set_xlabel("trained samples per second")
    axes.set_ylabel(f"{choice.measure}\n(bars: one standard error)")
    axes.margins(x=0.2, y=0.15)
    axes.legend(loc="best")
    return figure


def _rewards(settings: Sequence[GridSetting], styles: dict[str, LineStyle], *, over_seconds: bool) -> Figure | None:
    """Training reward: one panel for each combination of the other axes, all to one scale, with a line for each value
    of the first axis. A line is the smoothed mean over seeds, its band reaches from the lowest to the highest seed."""
    bands = {s.label: band([point.curve for point in s.finished], over_seconds=over_seconds) for s in settings}
    drawn = [setting for setting in settings if bands[setting.label] is not None]
    rests = list(dict.fromkeys(_rest(setting) for setting in drawn))
    if not rests:
        return None
    figure, panels = _panels(len(rests), min(_COLUMNS, len(rests)))
    for axes, rest in zip(panels, rests, strict=True):
        axes.set_title(", ".join(rest) or "Training reward", loc="left", fontsize=9, fontweight="bold")
        for setting in (each for each in drawn if _rest(each) == rest):
            _draw_band(axes, bands[setting.label], styles[setting.label].color, _first(setting))
    _to_one_scale(panels)
    named, firsts = _named(panels), list(dict.fromkeys(_first(setting) for setting in drawn))
    handles = [named[first] for first in firsts]
    panels[0].legend(handles, firsts, title=next(iter(drawn[0].values)), loc="lower right", fontsize=8)
    figure.supxlabel("seconds of training (steps and their waits)" if over_seconds else "optimizer step", fontsize=9)
    figure.supylabel("mean reward of a step", fontsize=9)
    return figure


def _draw_band(axes: Axes, found: Band | None, color: Any, label: str) -> None:
    if found is not None:
        axes.plot(found.xs, found.mean, color=color, label=label)
        axes.fill_between(found.xs, found.low, found.high, color=color, alpha=0.15, linewidth=0)


def _to_one_scale(panels: Sequence[Axes]) -> None:
    """Give all panels the same axes, so that their lines can be compared."""
    lows, highs = zip(*(axes.get_ylim() for axes in panels), strict=True)
    ends = max(axes.get_xlim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(min(lows), max(highs))
        axes.set_xlim(0, ends)


def _figures(settings: Sequence[GridSetting], styles: dict[str, LineStyle]) -> Figure | None:
    """Small multiples over the first axis: a dot for each seed, a line through the means of each combination of the
    other axes."""
    shown = {key: title for key, title in _PANELS.items() if any(setting.values_of(key) for setting in settings)}
    if not shown:
        return None
    figure, panels = _panels(len(shown), _COLUMNS)
    firsts = list(dict.fromkeys(_first(setting) for setting in settings))
    for axes, (key, title) in zip(panels, shown.items(), strict=True):
        axes.set_title(title, loc="left", fontsize=9)
        for rest in dict.fromkeys(_rest(setting) for setting in settings):
            _draw_panel(axes, [setting for setting in settings if _rest(setting) == rest], firsts, key, styles)
        axes.set_xticks(range(len(firsts)), firsts)
        highest = max(value for setting in settings for value in setting.values_of(key))
        axes.set_ylim(0, 1.15 * highest or 1.0)
        axes.margins(x=0.15)
    figure.supxlabel(next(iter(settings[0].values)), fontsize=9)
    if named := _named(panels):
        figure.legend(named.values(), named.keys(), loc="outside upper center", ncols=4, fontsize=8)
    return figure


def _named(panels: Sequence[Axes]) -> dict[str, Artist]:
    """Label -> line, over all panels, since no panel has to show every label."""
    shown = [axes.get_legend_handles_labels() for axes in panels]
    return {label: line for lines, labels in shown for line, label in zip(lines, labels, strict=True)}


def _draw_panel(
    axes: Axes, settings: Sequence[GridSetting], firsts: Sequence[str], key: str, styles: dict[str, LineStyle]
) -> None:
    """Draw the settings of one combination of the other axes."""
    means = [(firsts.index(_first(setting)), value) for setting in settings if (value := setting.mean(key)) is not None]
    if not means:
        return
    style, label = styles[settings[0].label], ", ".join(_rest(settings[0]))
    axes.plot(*zip(*means, strict=True), color=GREY, linestyle=style.line, marker=style.marker, label=label, zorder=1)
    for setting in settings:
        place, style, values = firsts.index(_first(setting)), styles[setting.label], setting.values_of(key)
        dots: dict[str, Any] = {"color": style.color, "marker": style.marker, "s": 28, "zorder": 2}
        axes.scatter([place] * len(values), values, clip_on=False, **dots)


def _panels(count: int, columns: int) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels in so many columns."""
    rows = -(-count // columns)
    figure, panels = new_figure(rows, columns, (8, 4.4) if columns == 1 else (10, 2.3 * rows + 0.7))
    for axes in panels[count:]:
        axes.set_axis_off()
    return figure, panels[:count]


def _first(setting: GridSetting) -> str:
    return next(iter(setting.values.values()))


def _rest(setting: GridSetting) -> tuple[str, ...]:
    return tuple(f"{key.split('.')[-1]}={value}" for key, value in list(setting.values.items())[1:])
