"""A short search for the setting with which TRL is fastest here: `compare` then uses it.

    python -m benchmarks.trl.search [--workload checks]

Each candidate runs a few steps in fresh processes; then the fastest of them run more, because a few steps with a long
tail say little. Threads and ranks fill the cores in every one of them; a candidate that cannot run at all is reported
with the last line of its log.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from async_grpo.errors import RoleFailed
from benchmarks.trl.policies import make_policies
from benchmarks.trl.sides import bind, command, run_trl
from benchmarks.trl.workloads import CACHE, WORKLOADS, TrlDials, Workload

CANDIDATE_TIMEOUT_S = 600.0
FINALISTS = 4


def candidates(samples: int, cores: int) -> Iterator[TrlDials]:
    """The settings to try: micro-batches of some sizes; ranks in place of threads; the other ways to generate."""
    sizes = [rows for rows in (8, 16, 32, 64, 128, 256) if rows <= samples and samples // rows <= 16]
    for rows in sizes:
        yield TrlDials(rows=rows, threads=cores)
    middle = sizes[len(sizes) // 2]
    if cores > 1:
        for rows in sizes[:3]:
            yield TrlDials(rows=rows, threads=1, processes=cores)
        yield TrlDials(rows=middle, threads=1, processes=cores, generation="continuous")
    yield TrlDials(rows=middle, threads=cores, cache="static")
    yield TrlDials(rows=middle, threads=cores, attention="eager")
    yield TrlDials(rows=middle, threads=cores, generation="continuous")


def main() -> None:
    """Try all candidates and keep the best of each workload."""
    arguments = _arguments()
    bind(arguments.cores)
    make_policies(CACHE)
    cores = len(os.sched_getaffinity(0))
    for name in arguments.workload or WORKLOADS:
        workload = WORKLOADS[name]
        workload.write_prompts()
        search = Search(workload, (arguments.out / name).absolute(), Console())
        config = workload.config(search.out, name)
        every = search.fastest_first(candidates(config.group_size * config.groups_per_step, cores), arguments.steps)
        best = search.fastest_first(every[:FINALISTS], arguments.final_steps)[0]
        search.console.print(f"{name}: best: {best}", markup=False)
        workload.dials_file(cores).write_text(json.dumps(asdict(best), indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Search:
    """The search for one workload."""

    workload: Workload
    out: Path
    console: Console

    def fastest_first(self, dials: Iterable[TrlDials], steps: int) -> list[TrlDials]:
        """Run each for so many steps; those that run, fastest first. Raises RoleFailed if none does."""
        speeds: dict[TrlDials, float] = {}
        for number, candidate in enumerate(dials):
            folder = self.out / f"{steps}-steps" / str(number)
            try:
                speeds[candidate] = speed(replace(self.workload, steps=steps, dials=candidate), folder)
                outcome = f"{speeds[candidate]:.3g} samples/s in {steps} steps"
            except RoleFailed as error:
                outcome = f"does not run: {error} {find_last_error(folder / 'trl.log')}"
            self.console.print(f"{self.workload.name}: {candidate}: {outcome}", markup=False)
        if not speeds:
            raise RoleFailed(f"{self.workload.name}: TRL runs with none of the settings. The logs are in {self.out}")
        return sorted(speeds, key=speeds.__getitem__, reverse=True)


def find_last_error(log: Path) -> str:
    """The last line of a log that names an error."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if "Error" in line]
    return lines[-1].strip()[:300] if lines else ""


def speed(workload: Workload, out: Path) -> float:
    """Samples/s of the steps after the first. Raises RoleFailed if it does not run."""
    steps = run_trl(workload, out, timeout_s=CANDIDATE_TIMEOUT_S).steps
    return sum(step.samples for step in steps[1:]) / (steps[-1].ended_s - steps[0].ended_s)


def _arguments() -> argparse.Namespace:
    parser = command("Look for TRL's fastest setting on this machine.", Path("runs/trl-search"))
    parser.add_argument("--steps", type=int, default=6, help="of each candidate")
    parser.add_argument("--final-steps", type=int, default=12, help=f"of the {FINALISTS} fastest, again")
    return parser.parse_args()


if __name__ == "__main__":
    main()
