"""The plots of a sweep: PNG files in DIR/plots.

The colour shows the value of the first axis; line and marker show those of the other axes.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.app.report.drawing import DASHES, GREY, RED, legend_above, new_figure, save_figures, scale_by_unit
from async_grpo.lab.sweep.recommend import Candidate, Recommendation
from async_grpo.lab.sweep.settings import Band, GridSetting, band
from async_grpo.telemetry.charts import HELD_OUT, METRIC_CHARTS, REWARD, ROLLOUT_IDLE, TRAINER_IDLE, Chart

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_COLUMNS = 3
_MOST_NAMED, _LONGEST_NAME = 8, 28
"""Points that are labelled with their values, and the characters of such a label; more or longer ones get a number."""
_LONGEST_LINE = 60
_NEAR = 25
"""Distance in pixels from which a line joins a point and its label."""
_AROUND = [(radius, angle) for radius in range(15, 240, 6) for angle in range(30, 390, 30)]
"""Candidate positions of a label around its point, nearest first: distance in pixels and angle in degrees."""
_TICK_ROOM = 26
"""Total characters of tick labels that fit side by side below a small panel."""
_LOG_FROM = 10
"""Ratio of the fastest to the slowest setting from which the axis of the throughput is logarithmic."""

_PANELS = {
    "accuracy_after": Chart(title=f"{HELD_OUT.title} at the end", unit=HELD_OUT.unit),
    "accuracy_mean": Chart(title=f"{HELD_OUT.title}, mean over the run", unit=HELD_OUT.unit),
    "samples_per_s": Chart(title="samples trained per second", unit="samples/s"),
    "tokens_per_s": METRIC_CHARTS["tokens_per_s"],
    "trainer_idle": METRIC_CHARTS[TRAINER_IDLE],
    "rollout_idle": METRIC_CHARTS[ROLLOUT_IDLE],
    "age_mean": METRIC_CHARTS["age_mean"],
    "age_max": METRIC_CHARTS["age_max"],
    "ess": METRIC_CHARTS["ess"],
    "clip_fraction": METRIC_CHARTS["clip_fraction"],
    "kl": METRIC_CHARTS["kl"],
    "logprob_gap_mean": METRIC_CHARTS["logprob_gap_mean"],
}
"""Field of PointMetrics -> chart of its panel."""


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

    firsts = list(dict.fromkeys(setting.first for setting in settings))
    rests = list(dict.fromkeys(setting.rest for setting in settings))
    styles = {}
    for setting in settings:
        place = firsts.index(setting.first) / max(1, len(firsts) - 1)
        rest = rests.index(setting.rest)
        marker = _MARKERS[(rest + rest // len(DASHES)) % len(_MARKERS)]
        styles[setting.label] = LineStyle(colormaps["viridis"](0.9 * place), DASHES[rest % len(DASHES)], marker)
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
    """Learning against speed; up and to the right is better. The title shows the keys, the labels of the points their
    values; many or long ones have a number that the key below explains."""
    if not candidates:
        return None
    values = [_short(", ".join(settings[one.label].values.values()), _LONGEST_LINE) for one in candidates]
    numbered = len(values) > _MOST_NAMED or max(map(len, values)) > _LONGEST_NAME
    columns = max(1, 80 // (max(map(len, values)) + 8))
    below = -(-len(values) // columns) if numbered else 0
    figure, [axes] = new_figure(1, 1, (8, 4.4 + 0.22 * below))
    keys = _short(", ".join(key.split(".")[-1] for key in settings[candidates[0].label].values), 50)
    axes.set_title(f"Learning against throughput, by {keys}", loc="left", fontweight="bold")
    front = pareto([(one.samples_per_s, one.learning) for one in candidates])
    axes.plot(*zip(*front, strict=True), color=GREY, linewidth=1, linestyle="--", zorder=1, label="not beaten in both")
    drawn = [_draw_candidate(axes, one, styles[one.label], chosen=one.label == choice.label) for one in candidates]
    if max(one.samples_per_s for one in candidates) > _LOG_FROM * min(one.samples_per_s for one in candidates):
        _log_axis(axes)
    axes.set_xlabel("trained samples per second")
    axes.set_ylabel(f"{choice.measure}\n(bars: one standard error)")
    axes.margins(x=0.15, y=0.15)
    legend_above(axes)
    texts = [str(place + 1) for place in range(len(values))] if numbered else values
    if numbered:
        key = [f"{text}: {value}" for text, value in zip(texts, values, strict=True)]
        style: dict[str, Any] = {"ncols": columns, "fontsize": 9, "frameon": False}
        figure.legend(drawn, key, loc="outside lower left", **style)
    place_labels(figure, axes, [(one.samples_per_s, one.learning) for one in candidates], texts)
    return figure


def _draw_candidate(axes: Axes, one: Candidate, style: LineStyle, *, chosen: bool) -> Artist:
    """Draw a point with its standard error, and a ring if it is recommended."""
    at = (one.samples_per_s, one.learning)
    bars: dict[str, Any] = {"color": style.color, "marker": style.marker, "markersize": 7, "capsize": 3}
    drawn = axes.errorbar(*at, yerr=one.error, linestyle="", **bars)
    if chosen:
        ring: dict[str, Any] = {"facecolors": "none", "edgecolors": RED, "linewidths": 2, "label": "recommended"}
        axes.scatter(*at, s=220, zorder=3, **ring)
    return drawn.lines[0]


def place_labels(
    figure: Figure, axes: Axes, points: Sequence[tuple[float, float]], texts: Sequence[str]
) -> list[Annotation]:
    """Write a text beside each point, where it covers neither a point nor another text; the nearest free place counts,
    and a line leads to a far one. Call it last: it needs the final layout."""
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()
    frame, scale = axes.get_window_extent(), figure.dpi / 72
    pixels = [axes.transData.transform(point) for point in points]
    taken = [Bbox.from_bounds(x - 9, y - 9, 18, 18) for x, y in pixels]
    labels = []
    for point, (x, y), text in zip(points, pixels, texts, strict=True):
        measured = figure.text(0, 0, text, fontsize=9)
        size = measured.get_window_extent()
        measured.remove()
        for radius, angle in _AROUND:
            dx, dy = (radius * turn(math.radians(angle)) for turn in (math.cos, math.sin))
            dx += math.copysign(size.width / 2, dx) if abs(dx) > 3 else 0
            box = Bbox.from_bounds(x + dx - size.width / 2, y + dy - size.height / 2, size.width, size.height)
            if frame.count_contains(box.corners()) == 4 and not box.count_overlaps(taken):
                break
        taken.append(box.padded(2))
        line = {"arrowstyle": "-", "color": GREY, "linewidth": 0.7, "shrinkB": 4} if radius > _NEAR else None
        style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9, "ha": "center", "va": "center"}
        labels.append(axes.annotate(text, point, (dx / scale, dy / scale), arrowprops=line, **style))
        labels[-1].set_in_layout(False)
    return labels


def _log_axis(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _rewards(settings: Sequence[GridSetting], styles: dict[str, LineStyle], *, over_seconds: bool) -> Figure | None:
    """Training reward: one panel for each combination of the other axes, all to one scale, with a line for each value
    of the first axis. A line is the smoothed mean over seeds, its band reaches from the lowest to the highest seed."""
    bands = {s.label: band([point.curve for point in s.finished], over_seconds=over_seconds) for s in settings}
    drawn = [setting for setting in settings if bands[setting.label] is not None]
    rests = list(dict.fromkeys(setting.rest for setting in drawn))
    if not rests:
        return None
    firsts = list(dict.fromkeys(setting.first for setting in drawn))
    figure, panels = _panels(len(rests), min(_COLUMNS, len(rests)))
    for axes, rest in zip(panels, rests, strict=True):
        title = textwrap.fill(_short(rest, 120), 80 if len(rests) == 1 else 38)
        axes.set_title(title or REWARD.heading, loc="left", fontsize=9, fontweight="bold")
        for setting in (each for each in drawn if each.rest == rest):
            dash = DASHES[firsts.index(setting.first) % len(DASHES)]
            _draw_band(axes, bands[setting.label], styles[setting.label].color, dash, setting.first)
    _to_one_scale(panels)
    named = _named(panels)
    _legend(figure, [named[first] for first in firsts], firsts, title=next(iter(drawn[0].values)))
    figure.supxlabel("seconds of training (steps and their waits)" if over_seconds else "optimizer step", fontsize=9)
    seeds = max(len(setting.finished) for setting in drawn) > 1
    figure.supylabel("mean reward of a step" + ("\n(band: lowest to highest seed)" if seeds else ""), fontsize=9)
    return figure


def _legend(figure: Figure, handles: Sequence[Artist], names: Sequence[str], title: str = "") -> None:
    """The legend of a figure, above its panels, in as many columns as there is room for."""
    shown = [_short(name, _LONGEST_LINE) for name in names]
    columns = max(1, min(len(shown), int(95 // (max(map(len, shown)) + 7))))
    figure.legend(handles, shown, title=title or None, loc="outside upper left", ncols=columns, fontsize=9)


def _draw_band(axes: Axes, found: Band | None, color: Any, dash: str, label: str) -> None:
    if found is not None:
        axes.plot(found.xs, found.mean, color=color, linestyle=dash, label=label)
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
    other axes, which has a colour of its own if there are several."""
    from matplotlib import colormaps

    shown = {key: chart for key, chart in _PANELS.items() if any(setting.values_of(key) for setting in settings)}
    if not shown:
        return None
    figure, panels = _panels(len(shown), _COLUMNS)
    firsts = list(dict.fromkeys(setting.first for setting in settings))
    rests = list(dict.fromkeys(setting.rest for setting in settings))
    colors = {rest: colormaps["tab10"](place % 10) if len(rests) > 1 else None for place, rest in enumerate(rests)}
    for axes, (key, chart) in zip(panels, shown.items(), strict=True):
        axes.set_title(chart.heading, loc="left", fontsize=9)
        for rest, color in colors.items():
            _draw_panel(axes, [setting for setting in settings if setting.rest == rest], firsts, key, styles, color)
        axes.set_xticks(range(len(firsts)), [_short(first, 16) for first in firsts], rotation=_turn(firsts))
        highest = max(value for setting in settings for value in setting.values_of(key))
        axes.set_ylim(0, 1.15 * highest or 1.0)
        scale_by_unit(axes, chart)
        axes.margins(x=0.15)
    figure.supxlabel(next(iter(settings[0].values)), fontsize=9)
    if named := _named(panels):
        _legend(figure, list(named.values()), list(named))
    return figure


def _named(panels: Sequence[Axes]) -> dict[str, Artist]:
    """Label -> line, over all panels, since no panel has to show every label."""
    shown = [axes.get_legend_handles_labels() for axes in panels]
    return {label: line for lines, labels in shown for line, label in zip(lines, labels, strict=True)}


def _draw_panel(
    axes: Axes,
    settings: Sequence[GridSetting],
    firsts: Sequence[str],
    key: str,
    styles: dict[str, LineStyle],
    color: Any,
) -> None:
    """Draw the settings of one combination of the other axes; `color` None: a grey line, and dots by the first axis."""
    means = [(firsts.index(setting.first), value) for setting in settings if (value := setting.mean(key)) is not None]
    if not means:
        return
    style, label = styles[settings[0].label], settings[0].rest
    line = color or GREY
    axes.plot(*zip(*means, strict=True), color=line, linestyle=style.line, marker=style.marker, label=label, zorder=1)
    for setting in settings:
        place, style, values = firsts.index(setting.first), styles[setting.label], setting.values_of(key)
        dots: dict[str, Any] = {"color": color or style.color, "marker": style.marker, "s": 28, "zorder": 2}
        axes.scatter([place] * len(values), values, clip_on=False, **dots)


def _panels(count: int, columns: int) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels in so many columns."""
    rows = -(-count // columns)
    figure, panels = new_figure(rows, columns, (8, 4.4) if columns == 1 else (10, 2.3 * rows + 0.7))
    for axes in panels[count:]:
        axes.set_axis_off()
    return figure, panels[:count]


def _turn(ticks: Sequence[str]) -> float:
    """Rotation in degrees that keeps the tick labels of a small panel apart."""
    return 90 if max(map(len, ticks)) * len(ticks) > _TICK_ROOM else 0


def _short(text: str, longest: int) -> str:
    """The text, its middle left out if it is longer.

    >>> _short("advantage=leave_one_out", 13)
    'advant…ne_out'
    """
    keep = (longest - 1) // 2
    return text if len(text) <= longest else f"{text[:keep]}…{text[-keep:]}"
