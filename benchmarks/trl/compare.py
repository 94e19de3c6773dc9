"""TRL's synchronous `GRPOTrainer` beside this project: the same policy, prompts, reward, groups, tokens and cores.

    policies, prompts --> [ ours | TRL ] , [ TRL | ours ] , ...   each run in fresh processes, one after the other
                              |      |
                              v      v
                         steps of both --> table, result.json, plot.png

    python -m benchmarks.trl.compare                      all workloads, twice each
    python -m benchmarks.trl.compare --workload tail --repeats 3

`make bench-trl` makes TRL's environment first. What is counted, and what the figures mean: README.md.
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
from benchmarks.trl.plot import draw
from benchmarks.trl.policies import make_policies
from benchmarks.trl.sides import TRL_PYTHON, Pace, SideRun, bind, command, our_side, pace, run_ours, run_trl
from benchmarks.trl.workloads import CACHE, WORKLOADS, Workload

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TrlComparison:
    """All runs of a workload: for each side, one for each repetition."""

    workload: Workload
    runs: dict[str, list[SideRun]]

    def paces(self, side: str) -> list[Pace]:
        """The pace of every repetition."""
        return [pace(run, self.workload.skip, self.workload.tail) for run in self.runs[side]]

    def against_trl(self, side: str) -> str:
        """Samples/s, repetition by repetition: the median, and the lowest and highest."""
        return str(Spread.of(*([each.samples_per_s for each in self.paces(name)] for name in (side, "TRL"))))

    def result(self) -> Result:
        """What result.json says of this workload."""
        return {
            "workload": self.workload.name,
            "trl": asdict(self.workload.dials),
            "steps": self.workload.steps,
            "counted": [self.workload.skip + 1, self.workload.steps - self.workload.tail],
            "sides": {
                side: {
                    "ratio": self.against_trl(side),
                    "paces": [asdict(each) for each in self.paces(side)],
                    "start_up_s": [run.start_up_s for run in runs],
                    "reward": [run.curve() for run in runs],
                }
                for side, runs in self.runs.items()
            },
        }


def main() -> None:
    """Run the whole comparison, print it and write its files."""
    arguments = _arguments()
    if not TRL_PYTHON.exists():
        sys.exit(f"{TRL_PYTHON} is missing: TRL's environment has not been made. Run `make bench-trl`")
    bind(arguments.cores)
    machine, console = Machine.detect(), Console()
    make_policies(CACHE)
    workloads = [chosen(WORKLOADS[name], arguments) for name in arguments.workload or WORKLOADS]
    comparisons = []
    for workload in workloads:
        comparisons.append(compare(workload, arguments, console))
        console.print(show(comparisons[-1], machine))
    write(arguments.out, comparisons, machine)
    console.print(f"{arguments.out / 'result.json'}, {arguments.out / 'plot.png'}")


def chosen(workload: Workload, arguments: argparse.Namespace) -> Workload:
    """The workload as it is run and counted. Raises ConfigError."""
    tuned = workload.tuned(len(os.sched_getaffinity(0)))
    return tuned.counting(max(arguments.staleness), arguments.steps or workload.steps)


def compare(workload: Workload, arguments: argparse.Namespace, console: Console) -> TrlComparison:
    """Run every side once in each repetition, in alternating order."""
    workload.write_prompts()
    sides: dict[str, Callable[[Path], SideRun]] = {
        our_side(staleness): partial(run_ours, workload, staleness=staleness, overrides=arguments.override)
        for staleness in arguments.staleness
    }
    sides["TRL"] = partial(run_trl, workload)
    runs: dict[str, list[SideRun]] = {side: [] for side in sides}
    for repetition, order in enumerate(alternate_order(sides, arguments.repeats)):
        for side in order:
            console.print(f"{workload.name}, {repetition + 1} of {arguments.repeats}: {side}")
            run = sides[side]((arguments.out / workload.name / str(repetition)).absolute())
            counted = pace(run, workload.skip, workload.tail)
            console.print(f"  {counted.samples_per_s:.3g} samples/s, first step after {run.start_up_s:.0f} s")
            runs[side].append(run)
    return TrlComparison(workload, runs)


def show(comparison: TrlComparison, machine: Machine) -> Table:
    """A table with a row for each side: medians of its repetitions."""
    view = Table(title=f"{comparison.workload.name}: TRL with {comparison.workload.dials}", caption=str(machine))
    view.add_column("side")
    for column in ("samples/s", "of TRL", "tokens/s", "s a step", "training", "tokens", "reward", "start s"):
        view.add_column(column, justify="right")
    for side, runs in comparison.runs.items():
        paces = comparison.paces(side)
        view.add_row(
            side,
            _median([each.samples_per_s for each in paces]),
            comparison.against_trl(side),
            _median([each.tokens_per_s for each in paces]),
            _median([each.step_s for each in paces]),
            f"{100 * median(each.busy_share for each in paces):.0f}%",
            _median([each.tokens_mean for each in paces]),
            f"{runs[0].steps[0].reward_mean:.2f} to {median(run.steps[-1].reward_mean for run in runs):.2f}",
            _median([run.start_up_s for run in runs]),
        )
    return view


def write(out: Path, comparisons: Sequence[TrlComparison], machine: Machine) -> None:
    """Write result.json and plot.png."""
    workloads = [comparison.result() for comparison in comparisons]
    content = {"machine": asdict(machine), "command": " ".join(sys.argv[1:]), "workloads": workloads}
    (out / "result.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    draw(content, out / "plot.png")


def _median(values: Sequence[float]) -> str:
    return f"{median(values):.3g}"


def _arguments() -> argparse.Namespace:
    parser = command("TRL's synchronous GRPOTrainer beside this project.", Path("runs/trl"))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, help="fewer or more steps than the workload has")
    parser.add_argument("--staleness", type=int, nargs="+", default=[2], help="S of each run of ours; 0 is on-policy")
    parser.add_argument("-o", "--override", action="append", default=[], help="KEY=VALUE for the runs of ours")
    return parser.parse_args()


if __name__ == "__main__":
    main()
