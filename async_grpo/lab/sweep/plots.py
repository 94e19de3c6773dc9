"""The plots of a sweep: PNG files in DIR/plots.

The colour shows the value of the first axis; line style and marker show the values of the other axes.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.app.report.drawing import (
    DASHES,
    GREY,
    RED,
    format_y_by_unit,
    make_figure,
    place_legend_above,
    save_figures,
)
from async_grpo.lab.sweep.recommend import Candidate, Recommendation
from async_grpo.lab.sweep.settings import Band, GridSetting, reward_band
from async_grpo.telemetry.charts import HELD_OUT, METRIC_CHARTS, REWARD, ROLLOUT_IDLE, TRAINER_IDLE, Chart

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_COLUMNS = 3
_MAX_LABELLED_POINTS = 8
_MAX_LABEL_LENGTH = 28
"""With more points or longer labels, points are numbered and a key explains the numbers."""
_MAX_LINE_LENGTH = 60
_LEADER_FROM = 25
"""Distance in pixels from which a line connects a point and its label."""
_LABEL_POSITIONS = [(radius, angle) for radius in range(15, 240, 6) for angle in range(30, 390, 30)]
"""Candidate positions of a label around its point, nearest first: distance in pixels and angle in degrees."""
_TICK_ROOM = 26
"""Total characters of tick labels that fit side by side below a small panel."""
_LOG_FROM = 10
"""Ratio of the fastest to the slowest setting from which the throughput axis is logarithmic."""

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
    """Draw every plot for which there are data; return the files in the order of the report."""
    finished = [setting for setting in settings if setting.finished]
    styles = assign_styles(finished)
    setting_by_label = {setting.label: setting for setting in finished}
    figures = {
        "tradeoff": _draw_tradeoff(candidates, setting_by_label, styles, choice),
        "reward_by_step": _draw_rewards(finished, styles, over_seconds=False),
        "reward_by_time": _draw_rewards(finished, styles, over_seconds=True),
        "figures": _draw_metrics(finished, styles),
    }
    return save_figures(folder, figures)


def assign_styles(settings: Sequence[GridSetting]) -> dict[str, LineStyle]:
    """Return label -> style: a colour per value of the first axis, a line style per combination of the others."""
    from matplotlib import colormaps

    firsts = list(dict.fromkeys(setting.first for setting in settings))
    rests = list(dict.fromkeys(setting.rest for setting in settings))
    styles = {}
    for setting in settings:
        position = firsts.index(setting.first) / max(1, len(firsts) - 1)
        rest = rests.index(setting.rest)
        # Shift the markers by one with every round of line styles, so that no pair of them repeats early.
        marker = _MARKERS[(rest + rest // len(DASHES)) % len(_MARKERS)]
        styles[setting.label] = LineStyle(colormaps["viridis"](0.9 * position), DASHES[rest % len(DASHES)], marker)
    return styles


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other point beats in both coordinates, sorted by the first.

    >>> pareto_front([(1, 3), (2, 2), (1.5, 1), (3, 1)])
    [(1, 3), (2, 2), (3, 1)]
    """
    front: list[tuple[float, float]] = []
    for point in sorted(set(points), reverse=True):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return front[::-1]


def _draw_tradeoff(
    candidates: Sequence[Candidate],
    setting_by_label: dict[str, GridSetting],
    styles: dict[str, LineStyle],
    choice: Recommendation,
) -> Figure | None:
    """Draw learning against speed; up and to the right is better.

    The title names the keys and the labels of the points their values. Many or long labels are replaced by numbers with
    a key below.
    """
    if not candidates:
        return None
    points = [(candidate.samples_per_s, candidate.learning) for candidate in candidates]
    settings = [setting_by_label[candidate.label] for candidate in candidates]
    values = [_shorten(", ".join(setting.values.values()), _MAX_LINE_LENGTH) for setting in settings]
    longest = max(map(len, values))
    is_numbered = len(values) > _MAX_LABELLED_POINTS or longest > _MAX_LABEL_LENGTH
    key_columns = max(1, 80 // (longest + 8))
    key_rows = -(-len(values) // key_columns) if is_numbered else 0

    figure, [axes] = make_figure(1, 1, (8, 4.4 + 0.22 * key_rows))
    keys = _shorten(", ".join(key.split(".")[-1] for key in settings[0].values), 50)
    axes.set_title(f"Learning against throughput, by {keys}", loc="left", fontweight="bold")
    front = zip(*pareto_front(points), strict=True)
    axes.plot(*front, color=GREY, linewidth=1, linestyle="--", zorder=1, label="Pareto front")
    markers = []
    for candidate in candidates:
        is_chosen = candidate.label == choice.label
        markers.append(_draw_candidate(axes, candidate, styles[candidate.label], is_chosen=is_chosen))

    speeds = [candidate.samples_per_s for candidate in candidates]
    if max(speeds) > _LOG_FROM * min(speeds):
        _use_log_axis(axes)
    axes.set_xlabel("trained samples per second")
    axes.set_ylabel(f"{choice.measure}\n(bars: one standard error)")
    axes.margins(x=0.15, y=0.15)
    place_legend_above(axes)

    labels = values
    if is_numbered:
        labels = [str(index + 1) for index in range(len(values))]
        key = [f"{label}: {value}" for label, value in zip(labels, values, strict=True)]
        figure.legend(markers, key, loc="outside lower left", ncols=key_columns, fontsize=9, frameon=False)
    place_labels(figure, axes, points, labels)
    return figure


def _draw_candidate(axes: Axes, candidate: Candidate, style: LineStyle, *, is_chosen: bool) -> Artist:
    """Draw a point with its standard error, and a ring if it is recommended."""
    x = candidate.samples_per_s
    y = candidate.learning
    bars: dict[str, Any] = {"color": style.color, "marker": style.marker, "markersize": 7, "capsize": 3}
    point = axes.errorbar(x, y, yerr=candidate.error, linestyle="", **bars)
    if is_chosen:
        ring: dict[str, Any] = {"facecolors": "none", "edgecolors": RED, "linewidths": 2, "label": "recommended"}
        axes.scatter(x, y, s=220, zorder=3, **ring)
    return point.lines[0]


def place_labels(
    figure: Figure, axes: Axes, points: Sequence[tuple[float, float]], texts: Sequence[str]
) -> list[Annotation]:
    """Write a text next to each point, at the nearest position that covers no point and no other text.

    A line leads to a distant label. Call this last: it needs the final layout.
    """
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()
    frame = axes.get_window_extent()
    pixels_per_point = figure.dpi / 72
    pixels = [axes.transData.transform(point) for point in points]
    taken = [Bbox.from_bounds(x - 9, y - 9, 18, 18) for x, y in pixels]

    labels = []
    for point, (x, y), text in zip(points, pixels, texts, strict=True):
        # Draw the text once to measure it.
        probe = figure.text(0, 0, text, fontsize=9)
        size = probe.get_window_extent()
        probe.remove()

        for radius, angle in _LABEL_POSITIONS:
            dx = radius * math.cos(math.radians(angle))
            dy = radius * math.sin(math.radians(angle))
            if abs(dx) > 3:  # to the side of the point: the text starts there instead of being centred
                dx += math.copysign(size.width / 2, dx)
            box = Bbox.from_bounds(x + dx - size.width / 2, y + dy - size.height / 2, size.width, size.height)
            if frame.count_contains(box.corners()) == 4 and not box.count_overlaps(taken):
                break
        taken.append(box.padded(2))

        leader = None
        if radius > _LEADER_FROM:
            leader = {"arrowstyle": "-", "color": GREY, "linewidth": 0.7, "shrinkB": 4}
        style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9, "ha": "center", "va": "center"}
        offset = (dx / pixels_per_point, dy / pixels_per_point)
        label = axes.annotate(text, point, offset, arrowprops=leader, **style)
        label.set_in_layout(False)  # or the next layout would shrink the axes and move the points away
        labels.append(label)
    return labels


def _use_log_axis(axes: Axes) -> None:
    """Make the x axis logarithmic, with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _draw_rewards(
    settings: Sequence[GridSetting], styles: dict[str, LineStyle], *, over_seconds: bool
) -> Figure | None:
    """Draw the training reward: a panel per combination of the other axes, a line per value of the first axis.

    A line is the smoothed mean over seeds; its band reaches from the lowest to the highest seed. All panels have the
    same scale.
    """
    bands: dict[str, Band] = {}
    drawn = []
    for setting in settings:
        band = reward_band([point.curve for point in setting.finished], over_seconds=over_seconds)
        if band is not None:
            bands[setting.label] = band
            drawn.append(setting)
    if not drawn:
        return None

    rests = list(dict.fromkeys(setting.rest for setting in drawn))
    firsts = list(dict.fromkeys(setting.first for setting in drawn))
    figure, panels = _make_panels(len(rests), min(_COLUMNS, len(rests)))
    for axes, rest in zip(panels, rests, strict=True):
        title = textwrap.fill(_shorten(rest, 120), 80 if len(rests) == 1 else 38)
        axes.set_title(title or REWARD.heading, loc="left", fontsize=9, fontweight="bold")
        for setting in drawn:
            if setting.rest == rest:
                dash = DASHES[firsts.index(setting.first) % len(DASHES)]
                _draw_band(axes, bands[setting.label], styles[setting.label].color, dash, setting.first)

    _share_scale(panels)
    lines = _legend_entries(panels)
    _draw_legend(figure, [lines[first] for first in firsts], firsts, title=next(iter(drawn[0].values)))
    figure.supxlabel("seconds of training (steps and their waits)" if over_seconds else "optimizer step", fontsize=9)
    label = "mean reward of a step"
    if max(len(setting.finished) for setting in drawn) > 1:
        label += "\n(band: lowest to highest seed)"
    figure.supylabel(label, fontsize=9)
    return figure


def _draw_legend(figure: Figure, handles: Sequence[Artist], names: Sequence[str], title: str = "") -> None:
    """Draw the legend of a figure above its panels, in as many columns as fit."""
    labels = [_shorten(name, _MAX_LINE_LENGTH) for name in names]
    columns = max(1, min(len(labels), int(95 // (max(map(len, labels)) + 7))))
    figure.legend(handles, labels, title=title or None, loc="outside upper left", ncols=columns, fontsize=9)


def _draw_band(axes: Axes, band: Band, color: Any, dash: str, label: str) -> None:
    axes.plot(band.xs, band.mean, color=color, linestyle=dash, label=label)
    axes.fill_between(band.xs, band.low, band.high, color=color, alpha=0.15, linewidth=0)


def _share_scale(panels: Sequence[Axes]) -> None:
    """Give all panels the same axes, so that their lines can be compared."""
    lows, highs = zip(*(axes.get_ylim() for axes in panels), strict=True)
    right = max(axes.get_xlim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(min(lows), max(highs))
        axes.set_xlim(0, right)


def _draw_metrics(settings: Sequence[GridSetting], styles: dict[str, LineStyle]) -> Figure | None:
    """Draw small multiples over the first axis: a dot per seed, a line through the means per combination of the others.

    Each combination has its own colour if there are several.
    """
    from matplotlib import colormaps

    charts = {key: chart for key, chart in _PANELS.items() if any(setting.values_of(key) for setting in settings)}
    if not charts:
        return None
    firsts = list(dict.fromkeys(setting.first for setting in settings))
    rests = list(dict.fromkeys(setting.rest for setting in settings))
    ticks = [_shorten(first, 16) for first in firsts]
    figure, panels = _make_panels(len(charts), _COLUMNS)
    for axes, (key, chart) in zip(panels, charts.items(), strict=True):
        axes.set_title(chart.heading, loc="left", fontsize=9)
        for index, rest in enumerate(rests):
            color = colormaps["tab10"](index % 10) if len(rests) > 1 else None
            members = [setting for setting in settings if setting.rest == rest]
            _draw_panel(axes, members, firsts, key, styles, color)
        axes.set_xticks(range(len(firsts)), ticks, rotation=_tick_rotation(firsts))
        highest = max(value for setting in settings for value in setting.values_of(key))
        axes.set_ylim(0, 1.15 * highest or 1.0)
        format_y_by_unit(axes, chart)
        axes.margins(x=0.15)

    figure.supxlabel(next(iter(settings[0].values)), fontsize=9)
    lines = _legend_entries(panels)
    if lines:
        _draw_legend(figure, list(lines.values()), list(lines))
    return figure


def _legend_entries(panels: Sequence[Axes]) -> dict[str, Artist]:
    """Return label -> line over all panels: no panel has to show every label."""
    entries: dict[str, Artist] = {}
    for axes in panels:
        lines, labels = axes.get_legend_handles_labels()
        entries.update(zip(labels, lines, strict=True))
    return entries


def _draw_panel(
    axes: Axes,
    settings: Sequence[GridSetting],
    firsts: Sequence[str],
    key: str,
    styles: dict[str, LineStyle],
    color: Any,
) -> None:
    """Draw the settings of one combination of the other axes.

    Without a `color` the line is grey and the dots are coloured by the first axis.
    """
    xs = []
    means = []
    for setting in settings:
        mean = setting.mean(key)
        if mean is not None:
            xs.append(firsts.index(setting.first))
            means.append(mean)
    if not means:
        return

    line_style = styles[settings[0].label]
    axes.plot(
        xs,
        means,
        color=color or GREY,
        linestyle=line_style.line,
        marker=line_style.marker,
        label=settings[0].rest,
        zorder=1,
    )
    for setting in settings:
        style = styles[setting.label]
        values = setting.values_of(key)
        x = firsts.index(setting.first)
        dots: dict[str, Any] = {"color": color or style.color, "marker": style.marker, "s": 28, "zorder": 2}
        axes.scatter([x] * len(values), values, clip_on=False, **dots)


def _make_panels(count: int, columns: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` panels in `columns` columns."""
    rows = -(-count // columns)
    figure, panels = make_figure(rows, columns, (8, 4.4) if columns == 1 else (10, 2.3 * rows + 0.7))
    for axes in panels[count:]:
        axes.set_axis_off()
    return figure, panels[:count]


def _tick_rotation(ticks: Sequence[str]) -> float:
    """Return the rotation in degrees that keeps the tick labels of a small panel apart."""
    return 90 if max(map(len, ticks)) * len(ticks) > _TICK_ROOM else 0


def _shorten(text: str, max_length: int) -> str:
    """Replace the middle of a long text by an ellipsis.

    >>> _shorten("advantage=leave_one_out", 13)
    'advant…ne_out'
    """
    keep = (max_length - 1) // 2
    return text if len(text) <= max_length else f"{text[:keep]}…{text[-keep:]}"
