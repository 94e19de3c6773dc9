"""`python -m benchmarks.planted --out DIR`: plants ten causes in ten real runs, and asks `why` about each of them.

    run 1: a reward that sleeps      async-grpo run --> runs/NAME --> why: cause, share, advice, what changes would give
    run 2: a disk that is slow       ...

Each run takes half a minute; one that is there is not made again. The policy is random and its completions have
prescribed lengths, as in `async-grpo bench pipeline`. Needs root (network namespaces) and a C compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from async_grpo.config import dump, load
from async_grpo.errors import AsyncGrpoError, ConfigError, RoleFailed
from async_grpo.lab.bench.pipeline.fixed_lengths import answer_for
from async_grpo.lab.bench.pipeline.setup import POLICY, CoreSplit, PipelineSetup
from async_grpo.lab.bench.pipeline.workload import VOCABULARY, FixedWork, StepPlan
from async_grpo.lab.bench.rollout.workload import number_model
from async_grpo.lab.simulate.calibrate import calibrate
from async_grpo.lab.simulate.recorded import read_recorded
from async_grpo.lab.simulate.settings import SimulatedSettings
from async_grpo.lab.simulate.whatif import Change, changes
from async_grpo.lab.simulate.why import Explanation, explain
from async_grpo.telemetry.bottleneck import ADVICE
from async_grpo.telemetry.logging import configure_logging
from benchmarks.planted.causes import CONSTANT, GROUPS, PLANTED, PROMPT, SIZE, PlantedRun
from benchmarks.slowdown import steps_of

STALENESS = 1
HELD_OUT = 64
LONGEST_S = 120.0
LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `why` says of a planted run."""

    name: str
    planted: PlantedRun
    found: Explanation
    best: Change | None
    """The change that gives most by the simulation; None if it cannot be calibrated on the run."""

    @property
    def is_right(self) -> bool:
        """Whether the planted cause is the one that was named."""
        return self.found.cause is self.planted.cause


def make(name: str, planted: PlantedRun, setup: PipelineSetup) -> Path:
    """Do the run, unless it has been done; returns its folder."""
    folder = setup.folder / "runs" / name.replace(" ", "-")
    if (folder / "summary.json").exists():
        return folder
    file = _write_config(folder.name, planted, setup)
    command, environment = planted.wrap([sys.executable, "-m", "async_grpo", "run", str(file)], file.parent)
    here = {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])}
    log = setup.folder / f"{folder.name}.log"
    with log.open("wb") as said:
        run = subprocess.Popen(command, stdout=said, stderr=said, env={**os.environ, **here, **environment})
        try:
            _follow(run, folder, planted)
        finally:
            run.terminate()
            run.wait(LONGEST_S)
    if not (folder / "summary.json").exists():
        raise RoleFailed(f"the run {folder.name} failed, or took more than {LONGEST_S:g} s: see {log}")
    return folder


def _write_config(name: str, planted: PlantedRun, setup: PipelineSetup) -> Path:
    work = FixedWork(GROUPS, SIZE, planted.lengths * planted.steps, (PROMPT,) * planted.steps)
    config = setup.config(name, work, StepPlan(STALENESS, planted.steps))
    file = setup.folder / "data" / name / "config.yaml"
    file.write_text(dump(config))
    file.write_text(dump(load(file, [f"name={name}", f"steps={planted.steps}", *planted.overrides])))
    rows = [{"question": f"{row} {row}", "answer": answer_for([CONSTANT])} for row in range(HELD_OUT)]
    (file.parent / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _follow(run: subprocess.Popen[bytes], folder: Path, planted: PlantedRun) -> None:
    """Wait for the run's end; from its first step until its last but one, plant what happens beside it."""
    until_s = time.monotonic() + LONGEST_S

    def wait_for(steps: int) -> None:
        while run.poll() is None and len(steps_of(folder)) < steps and time.monotonic() < until_s:
            time.sleep(LOOK_S)

    wait_for(1)
    with planted.beside(folder):
        wait_for(planted.steps - 1)
    try:
        run.wait(max(1.0, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        return


def judge(name: str, planted: PlantedRun, folder: Path) -> Verdict:
    """What `why` and the simulation say of the run."""
    recorded = read_recorded(folder)
    try:
        timings = calibrate([recorded]).timings
        best = changes(SimulatedSettings.of(recorded.config), timings)[0]
    except AsyncGrpoError:
        best = None
    return Verdict(name, planted, explain(recorded), best)


def table(verdicts: Sequence[Verdict]) -> Table:
    """A row a run."""
    made = Table(title=f"{sum(one.is_right for one in verdicts)} of {len(verdicts)} causes named", title_justify="left")
    for column in ("planted", "by", "named", "share", "best change, simulated"):
        made.add_column(column, justify="right" if column == "share" else "left")
    for one in verdicts:
        best = "" if one.best is None else f"{one.best.label} {one.best.speedup - 1:+.0%}"
        mark = "" if one.is_right else "[bold] (wrong)[/]"
        made.add_row(one.name, one.planted.how, one.found.cause.value + mark, f"{one.found.share:.0%}", best)
    return made


def main() -> None:
    """Do the runs that are missing, print the table and the advice; exits with 1 if a cause is not named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planted")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; they stay")
    parser.add_argument("--only", action="append", choices=sorted(PLANTED), help="this cause; may be repeated")
    typed = parser.parse_args()
    configure_logging("bench")
    setup = PipelineSetup(typed.out.absolute(), typed.out.absolute() / "model", POLICY, CoreSplit((), ()))
    if not setup.model.exists():
        setup.folder.mkdir(parents=True, exist_ok=True)
        number_model(setup.model, POLICY, VOCABULARY)
    console, verdicts, names = Console(width=140), list[Verdict](), typed.only or list(PLANTED)
    for name in names:
        try:
            verdicts.append(judge(name, PLANTED[name], make(name, PLANTED[name], setup)))
        except (ConfigError, RoleFailed) as error:  # the others may still be made
            console.print(f"{name}: {error}", highlight=False)
        else:
            console.print(f"{name}: {verdicts[-1].found.cause.value}", highlight=False)
    console.print(table(verdicts))
    for one in verdicts:
        console.print(f"{one.name}: {ADVICE[one.found.cause]}.", highlight=False)
    sys.exit(0 if sum(one.is_right for one in verdicts) == len(names) else 1)


if __name__ == "__main__":
    main()
