"""Compare this project with TRL's synchronous `GRPOTrainer`: same policy, prompts, reward, groups, tokens and cores.

    policies, prompts --> [ ours | TRL ] , [ TRL | ours ] , ...   each run in fresh processes, one run at a time
                              |      |
                              v      v
                         steps of both --> table, result.json, plot.png

    python -m benchmarks.trl.compare                      all workloads, twice each
    python -m benchmarks.trl.compare --workload tail --repeats 3

`make bench-trl` creates TRL's environment first. README.md explains what is counted and what the results mean.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from async_grpo.lab.bench.measure import Machine, Spread, alternate_order
from benchmarks.trl.plot import draw_plot
from benchmarks.trl.policies import make_policies
from benchmarks.trl.sides import (
    TRL_PYTHON,
    Pace,
    SideRun,
    bind_cores,
    compute_pace,
    make_parser,
    name_our_side,
    run_ours,
    run_trl,
)
from benchmarks.trl.workloads import CACHE, WORKLOADS, Workload

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TrlComparison:
    """All runs of a workload: per side, one run per repetition."""

    workload: Workload
    runs: dict[str, list[SideRun]]

    def compute_paces(self, side: str) -> list[Pace]:
        """Return the pace of every repetition."""
        return [compute_pace(run, self.workload.skip, self.workload.tail) for run in self.runs[side]]

    def format_ratio(self, side: str) -> str:
        """Format the ratio of the side's samples/s to TRL's, per repetition: median, lowest and highest."""
        ours = [pace.samples_per_s for pace in self.compute_paces(side)]
        trl = [pace.samples_per_s for pace in self.compute_paces("TRL")]
        return str(Spread.of(ours, trl))

    def make_result(self) -> Result:
        """Make the workload's entry of result.json."""
        sides = {}
        for side, runs in self.runs.items():
            sides[side] = {
                "ratio": self.format_ratio(side),
                "paces": [asdict(pace) for pace in self.compute_paces(side)],
                "start_up_s": [run.start_up_s for run in runs],
                "reward": [run.reward_curve() for run in runs],
            }
        return {
            "workload": self.workload.name,
            "trl": asdict(self.workload.trl_settings),
            "steps": self.workload.steps,
            "counted": [self.workload.skip + 1, self.workload.steps - self.workload.tail],
            "sides": sides,
        }


def main() -> None:
    """Run the whole comparison, print the tables, and write result.json and plot.png."""
    options = _parse_arguments()
    if not TRL_PYTHON.exists():
        sys.exit(f"{TRL_PYTHON} does not exist: TRL's environment has not been created. Run `make bench-trl`")
    bind_cores(options.cores)
    machine = Machine.detect()
    console = Console()
    make_policies(CACHE)

    # All workloads are checked before the first run, which takes minutes.
    workloads = [choose_settings(WORKLOADS[name], options) for name in options.workload or WORKLOADS]
    comparisons = []
    for workload in workloads:
        comparison = run_workload(workload, options, console)
        comparisons.append(comparison)
        console.print(make_table(comparison, machine))

    write_results(options.out, comparisons, machine)
    console.print(f"{options.out / 'result.json'}, {options.out / 'plot.png'}")


def choose_settings(workload: Workload, options: argparse.Namespace) -> Workload:
    """Return the workload with TRL's settings for these cores and the steps to run and count. Raises ConfigError."""
    tuned = workload.with_settings_for(len(os.sched_getaffinity(0)))
    return tuned.with_steps(options.steps or workload.steps, max(options.staleness))


def run_workload(workload: Workload, options: argparse.Namespace, console: Console) -> TrlComparison:
    """Run every side once per repetition, in alternating order."""
    workload.write_prompts()
    sides: dict[str, Callable[[Path], SideRun]] = {}
    for staleness in options.staleness:
        sides[name_our_side(staleness)] = partial(run_ours, workload, staleness=staleness, overrides=options.override)
    sides["TRL"] = partial(run_trl, workload)

    runs: dict[str, list[SideRun]] = {side: [] for side in sides}
    for repetition, order in enumerate(alternate_order(sides, options.repeats)):
        for side in order:
            console.print(f"{workload.name}, {repetition + 1} of {options.repeats}: {side}")
            run = sides[side]((options.out / workload.name / str(repetition)).absolute())
            pace = compute_pace(run, workload.skip, workload.tail)
            console.print(f"  {pace.samples_per_s:.3g} samples/s, first step after {run.start_up_s:.0f} s")
            runs[side].append(run)
    return TrlComparison(workload, runs)


def make_table(comparison: TrlComparison, machine: Machine) -> Table:
    """Make a table with a row per side: medians over its repetitions."""
    workload = comparison.workload
    table = Table(title=f"{workload.name}: TRL with {workload.trl_settings}", caption=str(machine))
    table.add_column("side")
    for column in ("samples/s", "of TRL", "tokens/s", "s per step", "training", "tokens", "reward", "start s"):
        table.add_column(column, justify="right")
    for side, runs in comparison.runs.items():
        paces = comparison.compute_paces(side)
        last_reward = median(run.steps[-1].reward_mean for run in runs)
        table.add_row(
            side,
            _format_median([pace.samples_per_s for pace in paces]),
            comparison.format_ratio(side),
            _format_median([pace.tokens_per_s for pace in paces]),
            _format_median([pace.step_s for pace in paces]),
            f"{100 * median(pace.busy_share for pace in paces):.0f}%",
            _format_median([pace.tokens_mean for pace in paces]),
            f"{runs[0].steps[0].reward_mean:.2f} to {last_reward:.2f}",
            _format_median([run.start_up_s for run in runs]),
        )
    return table


def write_results(out: Path, comparisons: Sequence[TrlComparison], machine: Machine) -> None:
    """Write result.json and plot.png."""
    workloads = [comparison.make_result() for comparison in comparisons]
    content = {"machine": asdict(machine), "command": " ".join(sys.argv[1:]), "workloads": workloads}
    (out / "result.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    draw_plot(content, out / "plot.png")


def _format_median(values: Sequence[float]) -> str:
    return f"{median(values):.3g}"


def _parse_arguments() -> argparse.Namespace:
    parser = make_parser("Compare this project with TRL's synchronous GRPOTrainer.", Path("runs/trl"))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, help="number of steps, instead of the workload's")
    parser.add_argument("--staleness", type=int, nargs="+", default=[2], help="S of each of our runs; 0 is on-policy")
    parser.add_argument("-o", "--override", action="append", default=[], help="KEY=VALUE for our runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
