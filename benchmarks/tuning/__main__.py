"""`python -m benchmarks.tuning WORKLOAD --out DIR`: compare the choice of `async-grpo tune` with a grid of real runs.

    calibration run --> async-grpo tune --> choice          both count as the time of tune
    one real run per point of the grid --> best point --> distance of the choice from it

The best point and the choice are run again, because the best of many noisy measurements is partly luck. The command can
be interrupted; it then continues with the missing runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from async_grpo.lab.bench.pipeline.setup import run_all
from async_grpo.lab.simulate.calibrate import MeasuredMetrics, measure_run
from async_grpo.lab.simulate.recorded import read_recorded
from async_grpo.telemetry.logging import configure_logging
from benchmarks.tuning.workloads import WORKLOADS, TuningBench

CALIBRATION = "calibration"
TUNE = "tune"
OUT_OF_TIME = 75
"""Exit code if runs are still missing."""


class TimedRuns:
    """Real runs of a workload, each done once. Their durations are stored in times.json."""

    def __init__(self, bench: TuningBench, deadline_s: float) -> None:
        self.bench = bench
        self._deadline_s = deadline_s
        self._file = bench.folder / "times.json"
        self.seconds: dict[str, float] = {}
        if self._file.exists():
            self.seconds = json.loads(self._file.read_text())

    def do_run(self, name: str, values: Mapping[str, str]) -> MeasuredMetrics:
        """Do the run, unless it is complete, and return its speeds. Exits with OUT_OF_TIME after the deadline."""
        if name not in self.seconds:
            if time.monotonic() > self._deadline_s:
                raise SystemExit(OUT_OF_TIME)
            started_s = time.monotonic()
            asyncio.run(run_all(self.bench.folder, [self.bench.make_config(name, values)], lambda *_: None))
            self.store_duration(name, started_s)
        return measure_run(read_recorded(self.bench.folder / "runs" / name))

    def store_duration(self, name: str, started_s: float) -> None:
        """Store the time since `started_s` of the monotonic clock. Marks `name` as complete."""
        self.seconds[name] = time.monotonic() - started_s
        self._file.write_text(json.dumps(self.seconds, indent=2))


def run_tune(runs: TimedRuns) -> dict[str, Any]:
    """Run `async-grpo tune` as a user would, unless it is complete. Returns the content of tune.json."""
    bench = runs.bench
    out = bench.folder / TUNE
    if TUNE not in runs.seconds:
        calibration = bench.folder / "runs" / CALIBRATION
        command = [sys.executable, "-m", "async_grpo.app.cli.main", TUNE, str(bench.config_file)]
        command += ["--from", str(calibration), "--out", str(out), *bench.workload.tune_options]
        started_s = time.monotonic()
        subprocess.run(command, check=True)
        runs.store_duration(TUNE, started_s)
    result: dict[str, Any] = json.loads((out / "tune.json").read_text())
    return result


def name_point(values: Mapping[str, str]) -> str:
    """Return the name of a point's run. `tune` lists a window for fifo too, which has none, so it is left out."""
    is_fifo = values.get("buffer.selector.kind") == "fifo"
    parts = []
    for key, value in values.items():
        if not (is_fifo and key.endswith(".window")):
            parts.append(f"{key.split('.')[-1]}.{value}")
    return "-".join(parts)


def main() -> None:
    """Do the missing runs, and print the table and the comparison."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning")
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; they stay")
    parser.add_argument("--minutes", type=float, default=60, help="start no run after this many minutes")
    parser.add_argument("--repeats", type=int, default=2, help="additional runs of the best point and of the choice")
    options = parser.parse_args()
    configure_logging("bench")

    bench = TuningBench((options.out / options.workload).absolute(), WORKLOADS[options.workload])
    bench.prepare()
    runs = TimedRuns(bench, time.monotonic() + 60 * options.minutes)
    runs.do_run(CALIBRATION, {})
    tuned = run_tune(runs)

    points = {name_point(values): values for values in bench.workload.grid}
    order = list(points)
    random.Random(1).shuffle(order)  # otherwise a slow minute of the machine could hit a whole column of the grid
    measured = {name: runs.do_run(name, points[name]) for name in order}
    best = max(points, key=lambda name: measured[name].tokens_per_s)
    chosen = name_point(tuned["chosen"])

    repeats: dict[str, list[MeasuredMetrics]] = {best: [], chosen: []}
    for number in range(1, options.repeats + 1):  # alternating, so that other load affects both
        for name, results in repeats.items():
            results.append(runs.do_run(f"{name}-again{number}", points[name]))

    Console(width=120).print(make_table(tuned, {name: measured[name] for name in points}, best, chosen))
    print(describe_choice(runs, measured, repeats, best, chosen))


def make_table(tuned: Mapping[str, Any], measured: Mapping[str, MeasuredMetrics], best: str, chosen: str) -> Table:
    """Make a table of the grid, measured and simulated."""
    simulated = {name_point(point["values"]): point for point in tuned["points"]}
    table = Table(title=f"{len(measured)} real runs", title_justify="left")
    for column in ("point", "tokens/s", "simulated", "mean age", "simulated", ""):
        table.add_column(column, justify="left" if column in ("point", "") else "right")
    for name, result in measured.items():
        point = simulated[name]
        marks = []
        if name == best:
            marks.append("best")
        if name == chosen:
            marks.append("tune")
        table.add_row(
            name,
            f"{result.tokens_per_s:,.0f}",
            f"{point['tokens_per_s']:,.0f}",
            f"{result.age_mean:.2f}",
            f"{point['age_mean']:.2f}",
            ", ".join(marks),
        )
    return table


def describe_choice(
    runs: TimedRuns,
    measured: Mapping[str, MeasuredMetrics],
    repeats: Mapping[str, Sequence[MeasuredMetrics]],
    best: str,
    chosen: str,
) -> str:
    """Compare the choice with the best point, the repeats with their first runs, and the time of both methods."""
    grid_s = sum(runs.seconds[name] for name in measured)
    tune_s = runs.seconds[CALIBRATION] + runs.seconds[TUNE]
    ratio = measured[chosen].tokens_per_s / measured[best].tokens_per_s

    repeat_speeds: dict[str, float] = {}
    spreads: list[float] = []
    for name, results in repeats.items():
        repeat_speeds[name] = fmean(result.tokens_per_s for result in results)
        spreads += [abs(result.tokens_per_s / measured[name].tokens_per_s - 1) for result in results]
    repeat_ratio = repeat_speeds[chosen] / repeat_speeds[best]

    return (
        f"tune chose {chosen}: {ratio - 1:+.1%} compared with the grid's best, {best}; in {len(repeats[best])} "
        f"additional runs of each {repeat_ratio - 1:+.1%}. A repeated point differs by up to {max(spreads):.1%}. The "
        f"calibration run and the search took {tune_s:.0f} s, the grid {grid_s:.0f} s ({tune_s / grid_s:.3f} of it)."
    )


if __name__ == "__main__":
    main()
