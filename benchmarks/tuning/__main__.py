"""`python -m benchmarks.tuning WORKLOAD --out DIR`: a grid of real runs, and what `async-grpo tune` chooses among it.

    calibration run --> async-grpo tune --> choice          the time of both counts as that of tune
    every point of the grid, a real run each --> the best, and how far the choice is from it

The best point and the choice are run again: the best of many noisy figures is partly luck. The command may be stopped;
it goes on with what is missing.
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
from async_grpo.lab.simulate.calibrate import Measured, measure
from async_grpo.lab.simulate.recorded import read_recorded
from async_grpo.telemetry.logging import configure_logging
from benchmarks.tuning.workloads import WORKLOADS, TuningBench

CALIBRATION, TUNE = "calibration", "tune"
OUT_OF_TIME = 75
"""Exit code where runs are still missing."""


class Runs:
    """Real runs of a workload, each once; their seconds from start to end are kept in times.json."""

    def __init__(self, bench: TuningBench, until_s: float) -> None:
        self.bench = bench
        self._until_s = until_s
        self._file = bench.folder / "times.json"
        self.seconds: dict[str, float] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def make(self, name: str, values: Mapping[str, str]) -> Measured:
        """Do the run, unless it has been done. Exits with 75 if the time is over."""
        if name not in self.seconds:
            if time.monotonic() > self._until_s:
                raise SystemExit(OUT_OF_TIME)
            began_s = time.monotonic()
            asyncio.run(run_all(self.bench.folder, [self.bench.config(name, values)], lambda *_: None))
            self.keep(name, began_s)
        return measure(read_recorded(self.bench.folder / "runs" / name))

    def keep(self, name: str, began_s: float) -> None:
        """Note how long something took, from `began_s` of the monotonic clock until now."""
        self.seconds[name] = time.monotonic() - began_s
        self._file.write_text(json.dumps(self.seconds, indent=2))


def tune(runs: Runs) -> dict[str, Any]:
    """What tune.json holds, by the command as a user types it."""
    bench = runs.bench
    out, began_s = bench.folder / TUNE, time.monotonic()
    if TUNE in runs.seconds:
        known: dict[str, Any] = json.loads((out / "tune.json").read_text())
        return known
    typed = [TUNE, str(bench.file), "--from", str(bench.folder / "runs" / CALIBRATION), "--out", str(out)]
    subprocess.run([sys.executable, "-m", "async_grpo.app.cli.main", *typed, *bench.workload.options], check=True)
    runs.keep(TUNE, began_s)
    found: dict[str, Any] = json.loads((out / "tune.json").read_text())
    return found


def name_of(values: Mapping[str, str]) -> str:
    """The name of a point's run; fifo has no window."""
    is_fifo = values.get("buffer.selector.kind") == "fifo"
    named = {key: value for key, value in values.items() if not (is_fifo and key.endswith(".window"))}
    return "-".join(f"{key.split('.')[-1]}.{value}" for key, value in named.items())


def main() -> None:
    """Do what is missing, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning")
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; they stay")
    parser.add_argument("--minutes", type=float, default=60, help="start no run after so many minutes")
    parser.add_argument("--repeats", type=int, default=2, help="further runs of the best point and of the choice")
    typed = parser.parse_args()
    configure_logging("bench")
    bench = TuningBench((typed.out / typed.workload).absolute(), WORKLOADS[typed.workload])
    bench.prepare()
    runs = Runs(bench, time.monotonic() + 60 * typed.minutes)
    runs.make(CALIBRATION, {})
    tuned = tune(runs)
    points = {name_of(values): values for values in bench.workload.grid}
    order = list(points)
    random.Random(1).shuffle(order)  # so that a slow minute of the machine is not a column of the grid
    found = {name: runs.make(name, points[name]) for name in order}
    best = max(points, key=lambda name: found[name].tokens_per_s)
    chosen = name_of(tuned["chosen"])
    again: dict[str, list[Measured]] = {best: [], chosen: []}
    for turn in range(1, typed.repeats + 1):  # in turns, so that both see the same machine
        for name, more in again.items():
            more.append(runs.make(f"{name}-again{turn}", points[name]))
    Console(width=120).print(table(tuned, {name: found[name] for name in points}, best, chosen))
    print(verdict(runs, found, again, best, chosen))


def table(tuned: Mapping[str, Any], found: Mapping[str, Measured], best: str, chosen: str) -> Table:
    """The grid beside the simulation."""
    simulated = {name_of(one["values"]): one for one in tuned["points"]}
    made = Table(title=f"{len(found)} real runs", title_justify="left")
    for column in ("point", "tokens/s", "simulated", "mean age", "simulated", ""):
        made.add_column(column, justify="left" if column in ("point", "") else "right")
    for name, one in found.items():
        said = simulated[name]
        marks = [mark for mark, it in (("best", best), ("tune", chosen)) if it == name]
        speeds = f"{one.tokens_per_s:,.0f}", f"{said['tokens_per_s']:,.0f}"
        made.add_row(name, *speeds, f"{one.age_mean:.2f}", f"{said['age_mean']:.2f}", ", ".join(marks))
    return made


def verdict(
    runs: Runs, found: Mapping[str, Measured], again: Mapping[str, Sequence[Measured]], best: str, chosen: str
) -> str:
    """How far the choice is from the best, how much two runs of one point differ, and what both ways took."""
    grid_s, tune_s = sum(runs.seconds[name] for name in found), runs.seconds[CALIBRATION] + runs.seconds[TUNE]
    fresh = {name: fmean(one.tokens_per_s for one in more) for name, more in again.items()}
    spreads = [abs(one.tokens_per_s / found[name].tokens_per_s - 1) for name, more in again.items() for one in more]
    return (
        f"tune chose {chosen}: {found[chosen].tokens_per_s / found[best].tokens_per_s - 1:+.1%} of the grid's best, "
        f"{best}; in {len(again[best])} further runs of each {fresh[chosen] / fresh[best] - 1:+.1%}. A point that is "
        f"run again differs by up to {max(spreads):.1%}. The calibration run and the search took {tune_s:.0f} s, the "
        f"grid {grid_s:.0f} s ({tune_s / grid_s:.3f} of it)."
    )


if __name__ == "__main__":
    main()
