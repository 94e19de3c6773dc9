"""The plots of a run: PNG files in run_dir/plots. Drawing needs no display and does not use pyplot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.telemetry.rows import Facts, Row, last_of_each, number, seconds_by_part
from async_grpo.utils.text import smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, GREY = "#2f6db5", "#e08a1e", "#3a9a5b", "#c4443c", "#8a8f98"
_PART_COLORS = {
    "wait": "#d9dce1",
    "pack": "#8fb8de",
    "prox": "#6f8f86",
    "reference": "#a3b86c",
    "train": BLUE,
    "optimizer": "#1d3f6e",
    "publish": ORANGE,
    "checkpoint": GREEN,
    "other": "#b6a7c9",
}
Point = tuple[float, float]


def write_plots(run_dir: Path, rows: Sequence[Row], summary: Facts) -> list[Path]:
    """Draw every plot for which there are data; returns the files in the order of the report."""
    steps = last_of_each(rows, "step")
    figures = {
        "accuracy": _accuracy(summary),
        "reward": _reward(steps),
        "loss": _loss(steps),
        "staleness": _staleness(summary),
        "time_split": _time_split(steps),
        "throughput": _throughput(steps),
    }
    return save_figures(run_dir / "plots", figures)


def save_figures(folder: Path, figures: Mapping[str, Figure | None]) -> list[Path]:
    """Write the figures that are not None to `folder`/NAME.png; returns the files in order."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        if figure is not None:
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], dpi=144)
    return paths


def smoothing_window(points: int) -> int:
    """The number of points to average in a curve of `points` points: a tenth, at most 25; 1 for short curves."""
    return max(1, min(25, points // 10))


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


def _reward(steps: Sequence[Row]) -> Figure | None:
    figure, (axes,) = _figure("Training reward", "optimizer step")
    if not _draw_series(axes, steps, "reward_mean", BLUE, "mean reward of a step"):
        return None
    axes.legend(loc="lower right")
    return figure


def _accuracy(summary: Facts) -> Figure | None:
    """Held-out accuracy by policy version, with labels at the first and last points."""
    evaluations = summary.get("evaluations") or []
    if not evaluations:
        return None
    figure, (axes,) = _figure("Accuracy on held-out prompts", "policy version")
    sampled = f"sampled, mean@{evaluations[0].get('samples', 'k')}"
    lines = (("sampled_accuracy", BLUE, sampled), ("greedy_accuracy", ORANGE, "greedy"))
    drawn = [_draw_accuracy(axes, evaluations, key, color, label) for key, color, label in lines]
    _label_points(axes, [(points[0], color) for points, color in drawn if points])
    _label_points(axes, [(points[-1], color) for points, color in drawn if len(points) > 1])
    axes.set_ylim(-0.09, 1.11)  # room for the labels of 0% and 100%
    axes.set_yticks([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.margins(x=0.1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.legend(loc="best")
    return figure


def _draw_accuracy(axes: Axes, evaluations: Sequence[Row], key: str, color: str, label: str) -> tuple[list[Point], str]:
    """Draw a line through the measured versions; returns its points and its colour."""
    points = [(float(e["version"]), value) for e in evaluations if (value := number(e, key)) is not None]
    if points:
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=color, marker="o", markersize=5, label=label)
    return points, color


def _label_points(axes: Axes, points: Sequence[tuple[Point, str]]) -> None:
    """Label the points of one version: above the highest, below the others."""
    for rank, ((x, y), color) in enumerate(sorted(points, key=lambda point: -point[0][1])):
        offset = (0, 9) if rank == 0 else (0, -17)
        style: dict[str, Any] = {"ha": "center", "color": color, "fontweight": "bold"}
        axes.annotate(f"{y:.1%}", (x, y), offset, textcoords="offset points", **style)


def _loss(steps: Sequence[Row]) -> Figure | None:
    figure, (loss, norm) = _figure("Loss and gradient norm", "optimizer step", rows=2)
    drawn = _draw_series(loss, steps, "loss", BLUE, "loss")
    drawn = _draw_series(norm, steps, "grad_norm", RED, "gradient norm") or drawn
    loss.set_ylabel("loss")
    norm.set_ylabel("gradient norm")
    return figure if drawn else None


def _staleness(summary: Facts) -> Figure | None:
    """Shares of the trained tokens by age, with the age bound."""
    tokens = {int(age): count for age, count in (summary.get("tokens_by_age") or {}).items()}
    total = sum(tokens.values())
    if not total:
        return None
    bound = summary.get("age_bound", max(tokens))
    figure, (axes,) = _figure("Age of the trained tokens", "age in optimizer steps")
    ages = range(max(bound, *tokens, 0) + 2)
    colors = [GREEN if age <= bound else RED for age in ages]
    bars = axes.bar(ages, [tokens.get(age, 0) / total for age in ages], width=0.7, color=colors)
    axes.bar_label(bars, [f"{tokens[age] / total:.1%}" if tokens.get(age) else "" for age in ages], padding=2)
    axes.axvline(bound + 0.5, color=GREY, linestyle="--", linewidth=1.2)
    axes.annotate(f" bound: {bound}", (bound + 0.5, 0.92), xycoords=("data", "axes fraction"), color="#555")
    axes.set_xticks(list(ages))
    axes.margins(y=0.15)
    axes.set_ylabel("share of trained tokens")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    return figure


def _time_split(steps: Sequence[Row]) -> Figure | None:
    """The parts of each step's wall time, as stacked areas."""
    parts = [seconds_by_part(row) for row in steps]
    names = [name for name in _PART_COLORS if any(part.get(name) for part in parts)]
    if not names:
        return None
    figure, (axes,) = _figure("Time of the trainer's step", "optimizer step")
    window = smoothing_window(len(steps))
    series = [smooth([part[name] for part in parts], window) for name in names]
    xs = [row["step"] for row in steps]
    axes.stackplot(xs, series, labels=names, colors=[_PART_COLORS[name] for name in names])
    axes.set_ylabel(f"seconds (mean of {window} steps)" if window > 1 else "seconds")
    axes.set_ylim(0)
    axes.margins(x=0)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _throughput(steps: Sequence[Row]) -> Figure | None:
    timed = [row for row in steps if number(row, "step_s") and number(row, "trained_tokens") is not None]
    if not timed:
        return None
    rates = [{"step": row["step"], "rate": row["trained_tokens"] / row["step_s"]} for row in timed]
    figure, (axes,) = _figure("Trained tokens per second", "optimizer step")
    _draw_series(axes, rates, "rate", GREEN, "tokens per second of wall time")
    axes.set_ylim(0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(loc="lower right")
    return figure


def _draw_series(axes: Axes, rows: Sequence[Row], key: str, color: str, label: str) -> bool:
    """Draw raw values thin and their trailing mean thick; False if no row has the key."""
    points = [(row["step"], value) for row in rows if (value := number(row, key)) is not None]
    if not points:
        return False
    xs, ys = zip(*points, strict=True)
    window = smoothing_window(len(points))
    if window > 1:
        axes.plot(xs, ys, color=color, alpha=0.3, linewidth=1)
        label = f"{label} (thick: mean of {window})"
    marker = "o" if len(xs) == 1 else None
    axes.plot(xs, smooth(ys, window), color=color, linewidth=2, marker=marker, markersize=3, label=label)
    return True


def _figure(title: str, xlabel: str, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """Panels one above the other, over the same integers."""
    from matplotlib.ticker import MaxNLocator

    figure, panels = new_figure(rows, 1, (8, 3.8 if rows == 1 else 5.2))
    panels[0].set_title(title, loc="left", fontweight="bold")
    panels[-1].set_xlabel(xlabel)
    for axes in panels[1:]:
        axes.sharex(panels[0])
    for axes in panels:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, panels
