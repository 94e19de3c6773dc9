"""Plot samples per second and reward against wall time, one row per workload.

python -m benchmarks.trl.plot RESULT_JSON PNG
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from async_grpo.telemetry.charts import Color

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Result = dict[str, Any]


def draw_plot(result: Result, path: Path) -> None:
    """Plot the content of `result.json` into `path`."""
    from matplotlib.figure import Figure

    workloads = result["workloads"]
    figure = Figure(figsize=(11, 3.6 * len(workloads)), layout="constrained")
    rows = figure.subplots(len(workloads), 2, squeeze=False, width_ratios=(1, 2))
    for (left, right), workload in zip(rows, workloads, strict=True):
        _plot_speeds(left, workload)
        _plot_rewards(right, workload)
    machine = result["machine"]
    figure.suptitle(f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']:g}, {machine['date']}", size=9)
    figure.savefig(path, dpi=144)


def _choose_colors(workload: Result) -> dict[str, str]:
    """Return a colour per side; TRL has the same one in all plots."""
    our_sides = [side for side in workload["sides"] if side != "TRL"]
    colors: dict[str, str] = dict(zip(our_sides, (Color.BLUE, Color.GREEN, Color.RED, Color.GREY), strict=False))
    colors["TRL"] = Color.ORANGE
    return colors


def _plot_speeds(axes: Axes, workload: Result) -> None:
    """Draw the median as a bar, each run as a point, and the ratio above them."""
    colors = _choose_colors(workload)
    for position, (side, result) in enumerate(workload["sides"].items()):
        values = [pace["samples_per_s"] for pace in result["paces"]]
        axes.bar(position, median(values), width=0.6, color=colors[side])
        axes.scatter([position] * len(values), values, color="black", s=14, zorder=3)
        if side != "TRL":
            label = "x " + result["ratio"].replace(" (", "\n(")
            axes.annotate(label, (position, max(values)), (0, 6), textcoords="offset points", ha="center", size=9)
    axes.set_xticks(range(len(workload["sides"])), list(workload["sides"]))
    axes.margins(y=0.25)
    axes.set_ylabel("samples/s, counted steps")
    axes.set_title(workload["workload"])


def _plot_rewards(axes: Axes, workload: Result) -> None:
    """Draw a line per run, from the start of its first process."""
    colors = _choose_colors(workload)
    for side, result in workload["sides"].items():
        for number, curve in enumerate(result["reward"]):
            seconds, rewards = zip(*curve, strict=True)
            label = side if number == 0 else None
            axes.plot(seconds, rewards, color=colors[side], linewidth=1.4, alpha=0.85, label=label)
    axes.set_xlabel("seconds since the start of the first process")
    axes.set_ylabel("mean reward per step")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.25)


def main() -> None:
    """Plot an existing result.json again."""
    source, target = map(Path, sys.argv[1:3])
    draw_plot(json.loads(source.read_text(encoding="utf-8")), target)


if __name__ == "__main__":
    main()
