"""The picture: samples per second of every run, and reward against wall time, a row a workload.

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


def draw(result: Result, path: Path) -> None:
    """Write the picture of `result.json`'s content."""
    from matplotlib.figure import Figure

    workloads = result["workloads"]
    figure = Figure(figsize=(11, 3.6 * len(workloads)), layout="constrained")
    rows = figure.subplots(len(workloads), 2, squeeze=False, width_ratios=(1, 2))
    for (left, right), workload in zip(rows, workloads, strict=True):
        _bars(left, workload)
        _rewards(right, workload)
    machine = result["machine"]
    figure.suptitle(f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']:g}, {machine['date']}", size=9)
    figure.savefig(path, dpi=144)


def _colors(workload: Result) -> dict[str, str]:
    ours = [side for side in workload["sides"] if side != "TRL"]
    return dict(zip(ours, (Color.BLUE, Color.GREEN, Color.RED, Color.GREY), strict=False)) | {"TRL": Color.ORANGE}


def _bars(axes: Axes, workload: Result) -> None:
    """Draw the median as a bar, each run as a point, the ratio above."""
    colors = _colors(workload)
    for place, (side, facts) in enumerate(workload["sides"].items()):
        values = [pace["samples_per_s"] for pace in facts["paces"]]
        axes.bar(place, median(values), width=0.6, color=colors[side])
        axes.scatter([place] * len(values), values, color="black", s=14, zorder=3)
        if side != "TRL":
            label = "x " + facts["ratio"].replace(" (", "\n(")
            axes.annotate(label, (place, max(values)), (0, 6), textcoords="offset points", ha="center", size=9)
    axes.set_xticks(range(len(workload["sides"])), list(workload["sides"]))
    axes.margins(y=0.25)
    axes.set_ylabel("samples/s, counted steps")
    axes.set_title(workload["workload"])


def _rewards(axes: Axes, workload: Result) -> None:
    """Draw a line for each run, from the start of its first process."""
    colors = _colors(workload)
    for side, facts in workload["sides"].items():
        for number, curve in enumerate(facts["reward"]):
            seconds, rewards = zip(*curve, strict=True)
            label = side if number == 0 else None
            axes.plot(seconds, rewards, color=colors[side], linewidth=1.4, alpha=0.85, label=label)
    axes.set_xlabel("seconds since its first process was started")
    axes.set_ylabel("mean reward of a step")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.25)


def main() -> None:
    """Draw the picture of a result again."""
    source, target = map(Path, sys.argv[1:3])
    draw(json.loads(source.read_text(encoding="utf-8")), target)


if __name__ == "__main__":
    main()
