"""Search for TRL's fastest settings on this machine. `compare` then uses them.

    python -m benchmarks.trl.search [--workload checks]

Each candidate runs a few steps in fresh processes. Then the fastest candidates run more steps, because with a long tail
of lengths a few steps are too noisy. Every candidate uses all cores, by threads or by ranks. A candidate that cannot
run is reported with the last error in its log.
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
from benchmarks.trl.sides import bind_cores, make_parser, run_trl
from benchmarks.trl.workloads import CACHE, WORKLOADS, TrlSettings, Workload

CANDIDATE_TIMEOUT_S = 600.0
FINALISTS = 4


def list_candidates(samples: int, cores: int) -> Iterator[TrlSettings]:
    """Yield the settings to try: sizes of the micro-batch, ranks instead of threads, other ways to generate."""
    sizes = [rows for rows in (8, 16, 32, 64, 128, 256) if rows <= samples and samples // rows <= 16]
    for rows in sizes:
        yield TrlSettings(rows=rows, threads=cores)
    middle = sizes[len(sizes) // 2]
    if cores > 1:
        for rows in sizes[:3]:
            yield TrlSettings(rows=rows, threads=1, processes=cores)
        yield TrlSettings(rows=middle, threads=1, processes=cores, generation="continuous")
    yield TrlSettings(rows=middle, threads=cores, cache="static")
    yield TrlSettings(rows=middle, threads=cores, attention="eager")
    yield TrlSettings(rows=middle, threads=cores, generation="continuous")


def main() -> None:
    """Try all candidates and store the fastest of each workload."""
    options = _parse_arguments()
    bind_cores(options.cores)
    make_policies(CACHE)
    cores = len(os.sched_getaffinity(0))
    for name in options.workload or WORKLOADS:
        workload = WORKLOADS[name]
        workload.write_prompts()
        search = Search(workload, (options.out / name).absolute(), Console())

        config = workload.make_config(search.out, name)
        candidates = list_candidates(config.group_size * config.groups_per_step, cores)
        finalists = search.rank_candidates(candidates, options.steps)[:FINALISTS]
        best = search.rank_candidates(finalists, options.final_steps)[0]

        search.console.print(f"{name}: best: {best}", markup=False)
        workload.settings_file(cores).write_text(json.dumps(asdict(best), indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Search:
    """The search for one workload."""

    workload: Workload
    out: Path
    console: Console

    def rank_candidates(self, candidates: Iterable[TrlSettings], steps: int) -> list[TrlSettings]:
        """Run each candidate for `steps` steps. Returns those that run, fastest first.

        Raises RoleFailed if none runs.
        """
        speeds: dict[TrlSettings, float] = {}
        for number, candidate in enumerate(candidates):
            folder = self.out / f"{steps}-steps" / str(number)
            workload = replace(self.workload, steps=steps, trl_settings=candidate)
            try:
                speeds[candidate] = measure_speed(workload, folder)
                outcome = f"{speeds[candidate]:.3g} samples/s in {steps} steps"
            except RoleFailed as error:
                outcome = f"does not run: {error} {find_last_error(folder / 'trl.log')}"
            self.console.print(f"{self.workload.name}: {candidate}: {outcome}", markup=False)

        if not speeds:
            raise RoleFailed(f"{self.workload.name}: TRL runs with none of the settings. The logs are in {self.out}")
        return sorted(speeds, key=speeds.__getitem__, reverse=True)


def find_last_error(log: Path) -> str:
    """Return the last line of the log that names an error, or an empty string."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if "Error" in line]
    return lines[-1].strip()[:300] if lines else ""


def measure_speed(workload: Workload, out: Path) -> float:
    """Run TRL and return the samples/s of the steps after the first. Raises RoleFailed if it does not run."""
    steps = run_trl(workload, out, timeout_s=CANDIDATE_TIMEOUT_S).steps
    return sum(step.samples for step in steps[1:]) / (steps[-1].ended_s - steps[0].ended_s)


def _parse_arguments() -> argparse.Namespace:
    parser = make_parser("Search for TRL's fastest settings on this machine.", Path("runs/trl-search"))
    parser.add_argument("--steps", type=int, default=6, help="steps per candidate")
    parser.add_argument("--final-steps", type=int, default=12, help=f"steps per finalist (the {FINALISTS} fastest)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
