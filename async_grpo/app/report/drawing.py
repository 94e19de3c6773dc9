"""Matplotlib helpers for the plots of runs and sweeps: figures, curves, bands, legends and files.

They need no display and no pyplot. Colours are those of `telemetry.charts`. Lines that share a panel also differ in
dashes or markers, so that a plot can be read without colour.
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
"""Standard errors on either side of a mean in a 95% interval."""
MAX_MARKED_POINTS = 20
"""Longest curve whose points get markers. Without markers, a curve of one point would be invisible."""
_COLORS = 128
"""Colours in the palette of a PNG file. A palette makes the file a third of the size without a visible difference."""
_DPI = 144
_MAX_EVENT_LINES = 20
"""Most events of a kind that get a vertical line each."""


def save_figures(folder: Path, figures: Mapping[str, Figure | None]) -> list[Path]:
    """Write the figures that are not None to `folder`/NAME.png. Returns the files in order."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        write_atomic(folder / f"{name}.png", _render_png(figure))
        for name, figure in figures.items()
        if figure is not None
    ]


def _render_png(figure: Figure) -> bytes:
    from PIL import Image

    full, reduced = io.BytesIO(), io.BytesIO()
    figure.savefig(full, dpi=_DPI)
    image = Image.open(full).convert("RGB").quantize(_COLORS, dither=Image.Dither.NONE)
    image.save(reduced, "PNG", optimize=True)
    return reduced.getvalue()


def make_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """Return a figure of `rows` * `columns` panels with a light grid, and its panels row by row.

    `size`: width and height in inches.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = [figure.add_subplot(rows, columns, index + 1) for index in range(rows * columns)]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    return figure, panels


def make_step_figure(titles: Sequence[str], columns: int = 1, *, shared: bool = True) -> tuple[Figure, list[Axes]]:
    """Return a figure with one panel per title, each over optimizer steps, and its panels.

    `shared`: True if all panels have the range of the first.
    """
    from matplotlib.ticker import MaxNLocator

    rows = -(-len(titles) // columns)
    if rows == 1:
        height = 3.8
    elif columns == 1:
        height = 2.6 * rows
    else:
        height = 1.9 * rows + 0.6
    figure, panels = make_figure(rows, columns, (8, height))

    for axes in panels[len(titles) :]:
        axes.set_axis_off()
    for index, (axes, title) in enumerate(zip(panels, titles, strict=False)):
        axes.set_title(title, loc="left", fontweight="bold", fontsize=12 if columns == 1 else 10)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        is_in_last_row = index >= len(titles) - columns
        if is_in_last_row:
            axes.set_xlabel("optimizer step")
        if index > 0 and shared:
            axes.sharex(panels[0])
    return figure, panels[: len(titles)]


def place_legend_above(axes: Axes, columns: int = 3) -> None:
    """Put the legend between the title and the panel, where it hides no line."""
    handles = axes.get_legend_handles_labels()[0]
    if not handles:
        return
    rows = -(-len(handles) // columns)
    axes.set_title(axes.get_title("left"), loc="left", fontweight="bold", pad=8 + 16 * rows)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        frameon=False,
        borderaxespad=0.2,
        fontsize=10,
    )


def smoothing_window(points: int) -> int:
    """Return the odd number of points to average in a curve of `points` points.

    About a tenth of a short curve, then 25, then a fiftieth of a long one; 1 below 30 points.

    >>> [smoothing_window(points) for points in (10, 100, 1000, 5000)]
    [1, 9, 25, 99]
    """
    widest = max(25, points // 50)
    window = min(widest, points // 10)
    return max(1, (window - 1) // 2 * 2 + 1)


def format_y_as_percent(axes: Axes) -> None:
    """Label the y axis in percent, with as many digits as the ticks need."""
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))


def format_y_by_unit(axes: Axes, chart: Chart) -> None:
    """Label the y axis in percent if the chart shows shares."""
    if chart.unit == "share":
        format_y_as_percent(axes)


def draw_series(
    axes: Axes, rows: Sequence[Row], key: str, *, label: str = "", band: str = "", exact: bool = False, **style: Any
) -> bool:
    """Draw the values of `key` by step as a pale line, and their mean over `smoothing_window` steps as a thick one.

    Args:
        axes: The panel.
        rows: Rows of the steps. Rows without the key are skipped.
        key: Key of the values.
        label: Name in the legend; "" for none.
        band: Key of a standard error. An area shows the 95% interval of the thick line, for independent steps.
        exact: True draws the values only, without smoothing.
        style: Arguments of `Axes.plot`.

    Returns False if no row has the key.
    """
    points = [(row["step"], value, number(row, band)) for row in rows if (value := number(row, key)) is not None]
    if not points:
        return False

    steps, values, errors = zip(*points, strict=True)
    color = style.get("color")
    window = 1 if exact else smoothing_window(len(points))
    means = smooth(values, window)
    if window > 1:
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.8)
        if label:
            label = f"{label} (thick: mean of {window} steps)"

    if None not in errors:
        half_widths = [Z_95 * error for error in errors_of_means(errors, window)]
        low = [mean - half for mean, half in zip(means, half_widths, strict=True)]
        high = [mean + half for mean, half in zip(means, half_widths, strict=True)]
        axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)

    if len(points) <= MAX_MARKED_POINTS:
        style = {"marker": "o", "markersize": 4, **style}
    axes.plot(steps, means, linewidth=2, label=label or None, **style)
    return True


def draw_curve(axes: Axes, rows: Sequence[Row], series: Series, *, exact: bool = False) -> bool:
    """Draw a curve of a chart with `draw_series`. Returns False if no row has its key."""
    key, _, name = series.key.partition(".")
    if name:  # the entry of a dictionary, such as buffer_groups.ready
        rows, key = extract_entry(rows, key, name), "value"
    return draw_series(
        axes,
        rows,
        key,
        label=series.label,
        band=series.error,
        exact=exact,
        color=series.color,
        linestyle=series.dash,
    )


def draw_limit(axes: Axes, series: Series, value: float) -> None:
    """Draw a limit of a chart as a horizontal line, with its value in the legend."""
    label = f"{series.label}: {value:,}"
    axes.axhline(value, label=label, color=series.color, linestyle=series.dash, linewidth=1.2)


def extract_entry(rows: Sequence[Row], key: str, name: str) -> list[dict[str, Any]]:
    """Return rows with `step` and `value`, where the value is the entry `name` of the dictionary `key`."""
    return [{"step": row["step"], "value": (row.get(key) or {}).get(name)} for row in rows]


def errors_of_means(errors: Sequence[float], window: int) -> list[float]:
    """Return the standard errors of `smooth(values, window)`, from those of the values: sqrt(sum e^2) / n."""
    half = window // 2
    counts = [len(errors[max(0, index - half) : index + half + 1]) for index in range(len(errors))]
    mean_squares = smooth([error**2 for error in errors], window)
    return [(square / count) ** 0.5 for square, count in zip(mean_squares, counts, strict=True)]


def mark_events(panels: Sequence[Axes], events: Mapping[str, Sequence[float]]) -> None:
    """Mark steps in every panel, by kind of event: a marker at the bottom, and a vertical line unless there are many.

    `events`: kind of event -> steps. At most two kinds.
    """
    styles = ((GREY, "^", ":"), (PURPLE, "x", "-."))
    for (name, steps), (color, marker, dash) in zip(events.items(), styles, strict=False):
        if not steps:
            continue
        for axes in panels:
            axes.plot(
                steps,
                [0] * len(steps),
                marker,
                label=name,
                color=color,
                markersize=5,
                zorder=4,
                transform=axes.get_xaxis_transform(),  # y = 0 is the bottom of the panel, whatever its range
            )
            if len(steps) <= _MAX_EVENT_LINES:
                for step in steps:
                    axes.axvline(step, color=color, linestyle=dash, linewidth=1, zorder=1)
