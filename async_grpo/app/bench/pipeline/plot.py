"""The picture of the bench: speed and idleness against staleness. Needs no display."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from async_grpo.app.bench.pipeline.observe import Observed
from async_grpo.app.bench.pipeline.results import Results
from async_grpo.app.report.plots import BLUE, GREEN, GREY, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR = 0.36


def write_plot(path: Path, results: Results, subtitle: str) -> None:
    """Draw a PNG file: tokens a second with the overlap bound above, idle shares of both sides below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6.2), layout="constrained")
    FigureCanvasAgg(figure)
    speed, idle = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_speed(speed, results)
    _draw_idle(idle, results)
    for axes in (speed, idle):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    speed.set_title("The same work at every staleness", loc="left", fontweight="bold", pad=22)
    speed.annotate(subtitle, (0, 1.03), xycoords="axes fraction", color="#555", fontsize=9)
    idle.set_xticks(range(len(results.staleness)), [str(one) for one in results.staleness])
    idle.set_xlabel("max_staleness S")
    figure.savefig(path, dpi=144, format="png")


def _draw_speed(axes: Axes, results: Results) -> None:
    places = list(range(len(results.staleness)))
    found = [results.spread(one, lambda seen: seen.tokens_per_s) for one in results.staleness]
    middle = [one.median for one in found]
    errors = [[one.median - one.lowest for one in found], [one.highest - one.median for one in found]]
    pairs = zip(results.sides, results.by_staleness[0], strict=True)
    bounds = [sides.bound * sync.tokens_per_s for sides, sync in pairs]
    axes.axhspan(min(bounds), max(bounds), color=ORANGE, alpha=0.15, linewidth=0)
    bound = median(bounds)
    axes.axhline(bound, color=ORANGE, linestyle="--", linewidth=1.4, label="bound of overlap alone")
    axes.axhline(middle[0], color=GREY, linestyle=":", linewidth=1.2, label="synchronous (S = 0)")
    axes.errorbar(places, middle, errors, color=BLUE, marker="o", linewidth=2, capsize=4, label="measured")
    for place, staleness in zip(places[1:], results.staleness[1:], strict=True):
        text = f"{results.speedup(staleness).median:.2f}x"
        axes.annotate(text, (place, middle[place]), (8, -16), textcoords="offset points", color=BLUE)
    axes.set_ylim(0, 1.12 * max(*bounds, *(one.highest for one in found)))
    axes.set_ylabel("completion tokens per second")
    axes.legend(loc="lower right")


def _draw_idle(axes: Axes, results: Results) -> None:
    _draw_bars(axes, results, "trainer", GREEN, -_BAR / 2, lambda seen: seen.trainer_idle)
    _draw_bars(axes, results, "rollout server", ORANGE, _BAR / 2, lambda seen: seen.rollout_idle)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylabel("idle")
    axes.legend(loc="upper right")


def _draw_bars(
    axes: Axes, results: Results, label: str, color: str, offset: float, share: Callable[[Observed], float]
) -> None:
    """Draw a bar for each staleness, with its value above."""
    shares = [results.spread(one, share).median for one in results.staleness]
    bars = axes.bar([place + offset for place in range(len(shares))], shares, width=_BAR, color=color, label=label)
    axes.bar_label(bars, [f"{value:.0%}" for value in shares], padding=2, fontsize=8)
