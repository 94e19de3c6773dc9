"""How the plots of runs and sweeps look: figures, curves, bands, legends and files. It needs no display and no pyplot.

Colours are those of `telemetry.charts`. Lines that share a panel also differ in their dashes or markers, so that a plot
can be read without colour.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.telemetry.charts import Chart, Color, Series
from async_grpo.telemetry.rows import Row, number
from async_grpo.utils.files import write_atomic
from async_grpo.utils.text import smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN = Color.BLUE, Color.ORANGE, Color.GREEN
RED, PURPLE, GREY = Color.RED, Color.PURPLE, Color.GREY
DASHES = ("-", "--", ":", "-.")
Z_95 = 1.96
"""Standard errors on either side of a mean that make a 95% interval."""
_COLORS = 128
"""Colours in the palette of a PNG file, which makes it a third of the size without a visible difference."""
_DPI = 144
_MANY_MARKS = 20


def save_figures(folder: Path, figures: Mapping[str, Figure | None]) -> list[Path]:
    """Write the figures that are not None to `folder`/NAME.png; returns the files in order."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {name: figure for name, figure in figures.items() if figure is not None}
    return [write_atomic(folder / f"{name}.png", _png(figure)) for name, figure in drawn.items()]


def _png(figure: Figure) -> bytes:
    from PIL import Image

    drawn, packed = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, dpi=_DPI)
    Image.open(drawn).convert("RGB").quantize(_COLORS, dither=Image.Dither.NONE).save(packed, "PNG", optimize=True)
    return packed.getvalue()


def new_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """A figure of `rows` * `columns` panels with a quiet grid, `size` inches wide and high, and its panels by row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = [figure.add_subplot(rows, columns, place + 1) for place in range(rows * columns)]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    return figure, panels


def panels_over_steps(titles: Sequence[str], columns: int = 1, *, shared: bool = True) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each title, over optimizer steps; over the same ones, if they share the axis."""
    from matplotlib.ticker import MaxNLocator

    rows = -(-len(titles) // columns)
    height = 3.8 if rows == 1 else 2.6 * rows if columns == 1 else 1.9 * rows + 0.6
    figure, panels = new_figure(rows, columns, (8, height))
    for axes in panels[len(titles) :]:
        axes.set_axis_off()
    for place, (axes, title) in enumerate(zip(panels, titles, strict=False)):
        axes.set_title(title, loc="left", fontweight="bold", fontsize=12 if columns == 1 else 10)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        if place >= len(titles) - columns:
            axes.set_xlabel("optimizer step")
        if place and shared:
            axes.sharex(panels[0])
    return figure, panels[: len(titles)]


def legend_above(axes: Axes, columns: int = 3) -> None:
    """Put the legend between the title and the panel, where it hides no line."""
    handles = axes.get_legend_handles_labels()[0]
    if not handles:
        return
    rows = -(-len(handles) // columns)
    axes.set_title(axes.get_title("left"), loc="left", fontweight="bold", pad=8 + 16 * rows)
    axes.legend(
        **{"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": columns, "frameon": False, "borderaxespad": 0.2},
        fontsize=10,
    )


def smoothing_window(points: int) -> int:
    """The number of points, odd, to average in a curve of `points` points: about a tenth, from 25 to a fiftieth of
    long curves; 1 for short curves.

    >>> [smoothing_window(points) for points in (10, 100, 1000, 5000)]
    [1, 9, 25, 99]
    """
    return max(1, (min(max(25, points // 50), points // 10) - 1) // 2 * 2 + 1)


def percent(axes: Axes) -> None:
    """Label the y axis in percent, with as many digits as the ticks need."""
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))


def draw_series(
    axes: Axes, rows: Sequence[Row], key: str, *, label: str = "", band: str = "", exact: bool = False, **style: Any
) -> bool:
    """Draw the values of `key` by step: thin and pale, and thick their mean over `smoothing_window` steps; alone if
    `exact`.

    `band`: key of a standard error; an area shows the 95% interval of the thick line, if the steps are independent.
    Returns whether any row has the key.
    """
    points = [(row["step"], value, number(row, band)) for row in rows if (value := number(row, key)) is not None]
    if not points:
        return False
    xs, ys, errors = zip(*points, strict=True)
    window = 1 if exact else smoothing_window(len(points))
    thick = smooth(ys, window)
    if window > 1:
        axes.plot(xs, ys, color=style.get("color"), alpha=0.3, linewidth=0.8)
        label = label and f"{label} (thick: mean of {window} steps)"
    if None not in errors:
        half = [Z_95 * wide for wide in error_of_means(errors, window)]
        low, high = ([y + sign * wide for y, wide in zip(thick, half, strict=True)] for sign in (-1, 1))
        axes.fill_between(xs, low, high, color=style.get("color"), alpha=0.2, linewidth=0)
    marker = {"marker": "o", "markersize": 4} if len(xs) <= 20 else {}
    axes.plot(xs, thick, linewidth=2, label=label or None, **{**marker, **style})
    return True


def draw_curve(axes: Axes, rows: Sequence[Row], series: Series, *, exact: bool = False) -> bool:
    """Draw a curve of a chart by `draw_series`; an entry of a dictionary has a dotted key. Returns True if any row has
    the key."""
    key, _, name = series.key.partition(".")
    if name:
        rows, key = entries_of(rows, key, name), "value"
    style = {"color": series.color, "linestyle": series.dash}
    return draw_series(axes, rows, key, label=series.label, band=series.error, exact=exact, **style)


def draw_limit(axes: Axes, series: Series, value: float) -> None:
    """Draw a limit of a chart as a line across, with its value in the legend."""
    style: dict[str, Any] = {"color": series.color, "linestyle": series.dash, "linewidth": 1.2}
    axes.axhline(value, label=f"{series.label}: {value:,}", **style)


def entries_of(rows: Sequence[Row], key: str, name: str) -> list[dict[str, Any]]:
    """Rows of step and `value`, which is the entry `name` of the dictionary `key`."""
    return [{"step": row["step"], "value": (row.get(key) or {}).get(name)} for row in rows]


def scale_by_unit(axes: Axes, chart: Chart) -> None:
    """Label the y axis in percent if the chart shows shares."""
    if chart.unit == "share":
        percent(axes)


def error_of_means(errors: Sequence[float], window: int) -> list[float]:
    """The standard error of each value of `smooth(values, window)`, from those of the values: sqrt(sum e^2) / n."""
    counts = [len(errors[max(0, at - window // 2) : at + window // 2 + 1]) for at in range(len(errors))]
    means = smooth([error**2 for error in errors], window)
    return [(mean / count) ** 0.5 for mean, count in zip(means, counts, strict=True)]


def mark_events(panels: Sequence[Axes], events: Mapping[str, Sequence[float]]) -> None:
    """Mark steps in every panel, each kind of event with its own line; many events get ticks at the bottom alone."""
    for (name, steps), color, marker, dash in zip(events.items(), (GREY, PURPLE), "^x", (":", "-."), strict=False):
        for axes in panels:
            if not steps:
                continue
            bottom = axes.get_xaxis_transform()
            style: dict[str, Any] = {"color": color, "transform": bottom, "markersize": 5, "zorder": 4}
            axes.plot(steps, [0] * len(steps), marker, label=name, **style)
            for step in steps if len(steps) <= _MANY_MARKS else ():
                axes.axvline(step, color=color, linestyle=dash, linewidth=1, zorder=1)
