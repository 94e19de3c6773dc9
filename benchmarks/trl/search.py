"""A short search for the setting with which TRL is fastest here: `compare` then uses it.

    python -m benchmarks.trl.search [--workload checks]

Each candidate runs a few steps in fresh processes. Threads and ranks fill the cores in every one of them; a candidate
that cannot run at all is reported with the last line of its log.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from rich.console import Console

from async_grpo.errors import RoleFailed
from benchmarks.trl.policy import make_policies
from benchmarks.trl.rows import TrlDials
from benchmarks.trl.sides import add_cores, bind, end_children_on_sigterm, run_trl
from benchmarks.trl.workloads import CACHE, WORKLOADS, Workload

CANDIDATE_TIMEOUT_S = 240.0


def candidates(samples: int, cores: int) -> Iterator[TrlDials]:
    """Micro-batches of some sizes; ranks in place of threads; the other ways to generate."""
    sizes = [rows for rows in (8, 16, 32, 64, 128, 256) if rows <= samples and samples // rows <= 16]
    for rows in sizes:
        yield TrlDials(rows=rows, threads=cores)
    middle = sizes[len(sizes) // 2]
    if cores > 1:
        for rows in sizes[:3]:
            yield TrlDials(rows=rows, threads=1, processes=cores)
    yield TrlDials(rows=middle, threads=cores, cache="static")
    yield TrlDials(rows=middle, threads=cores, attention="eager")
    yield TrlDials(rows=middle, threads=cores, generation="continuous")


def main() -> None:
    """Try all, keep the best of each workload."""
    arguments = _arguments()
    bind(arguments.cores)
    cores = len(os.sched_getaffinity(0))
    end_children_on_sigterm()
    make_policies(CACHE)
    for name in arguments.workload or WORKLOADS:
        workload = replace(WORKLOADS[name], steps=arguments.steps)
        workload.write_prompts()
        best = search(workload, cores, (arguments.out / name).absolute(), Console())
        workload.dials_file(cores).write_text(json.dumps(asdict(best), indent=2) + "\n", encoding="utf-8")


def search(workload: Workload, cores: int, out: Path, console: Console) -> TrlDials:
    """The fastest candidate. Raises RoleFailed if none runs."""
    spec = workload.spec(out)
    speeds: dict[TrlDials, float] = {}
    for number, dials in enumerate(candidates(spec.group_size * spec.groups_per_step, cores)):
        folder = out / str(number)
        try:
            speeds[dials] = speed(workload.with_dials(dials), folder)
            outcome = f"{speeds[dials]:.3g} samples/s"
        except RoleFailed as error:
            outcome = f"does not run: {error} {last_error(folder / 'trl.log')}"
        console.print(f"{workload.name}: {dials}: {outcome}", markup=False)
    if not speeds:
        raise RoleFailed(f"{workload.name}: TRL runs with none of the settings. The logs are in {out}")
    best = max(speeds, key=speeds.__getitem__)
    console.print(f"{workload.name}: best: {best}")
    return best


def last_error(log: Path) -> str:
    """The last line of a log that names an error."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if "Error" in line]
    return lines[-1].strip()[:300] if lines else ""


def speed(workload: Workload, out: Path) -> float:
    """Samples/s of the median step behind the first. Raises RoleFailed if it does not run."""
    steps = run_trl(workload, out, timeout_s=CANDIDATE_TIMEOUT_S).steps
    seconds = [after.ended_s - before.ended_s for before, after in pairwise(steps)]
    return steps[-1].samples / median(seconds)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Look for TRL's fastest setting on this machine.")
    parser.add_argument("--workload", action="append", choices=sorted(WORKLOADS), help="default: all")
    parser.add_argument("--steps", type=int, default=3)
    add_cores(parser)
    parser.add_argument("--out", type=Path, default=Path("runs/trl-search"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
