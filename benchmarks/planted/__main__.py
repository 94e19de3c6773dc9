"""`python -m benchmarks.planted --out DIR`: plant ten causes in ten real runs, and check that `why` finds each.

    run 1: a reward that sleeps      async-grpo run --> runs/NAME --> why: cause, share, advice, gain of each change
    run 2: a slow disk               ...

A run takes half a minute; runs that exist already are not repeated. The policy is random and its completions have
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
from async_grpo.lab.simulate.whatif import Change, simulate_changes
from async_grpo.lab.simulate.why import Explanation, explain_run
from async_grpo.telemetry.bottleneck import ADVICE
from async_grpo.telemetry.logging import configure_logging
from benchmarks.planted.causes import CONSTANT, GROUPS, PLANTED, PROMPT, SIZE, PlantedRun
from benchmarks.slowdown import read_steps

STALENESS = 1
HELD_OUT = 64
RUN_TIMEOUT_S = 120.0
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Result of `why` for a planted run."""

    name: str
    planted: PlantedRun
    explanation: Explanation
    best_change: Change | None
    """The change with the largest simulated gain. None if the simulation cannot be calibrated on the run."""

    @property
    def is_correct(self) -> bool:
        """True if `why` named the planted cause."""
        return self.explanation.cause is self.planted.cause


def do_run(name: str, planted: PlantedRun, setup: PipelineSetup) -> Path:
    """Do the run, unless it is complete. Returns its folder. Raises ConfigError, RoleFailed."""
    folder = setup.folder / "runs" / name.replace(" ", "-")
    if (folder / "summary.json").exists():
        return folder

    file = _write_config(folder.name, planted, setup)
    plain_command = [sys.executable, "-m", "async_grpo", "run", str(file)]
    command, environment = planted.wrap_command(plain_command, file.parent)
    python_path = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    log = setup.folder / f"{folder.name}.log"
    with log.open("wb") as output:
        run = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, "PYTHONPATH": python_path, **environment}
        )
        try:
            _disturb_until_end(run, folder, planted)
        finally:
            run.terminate()
            run.wait(RUN_TIMEOUT_S)

    if not (folder / "summary.json").exists():
        raise RoleFailed(f"the run {folder.name} failed, or took more than {RUN_TIMEOUT_S:g} s. See {log}")
    return folder


def _write_config(name: str, planted: PlantedRun, setup: PipelineSetup) -> Path:
    work = FixedWork(GROUPS, SIZE, planted.lengths * planted.steps, (PROMPT,) * planted.steps)
    config = setup.build_config(name, work, StepPlan(STALENESS, planted.steps))
    file = setup.folder / "data" / name / "config.yaml"
    file.write_text(dump(config))
    file.write_text(dump(load(file, [f"name={name}", f"steps={planted.steps}", *planted.overrides])))
    rows = [{"question": f"{row} {row}", "answer": answer_for([CONSTANT])} for row in range(HELD_OUT)]
    (file.parent / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _disturb_until_end(run: subprocess.Popen[bytes], folder: Path, planted: PlantedRun) -> None:
    """Wait until the run ends, or the timeout. Disturb it from its first step until its second to last."""
    deadline_s = time.monotonic() + RUN_TIMEOUT_S

    def wait_for_steps(count: int) -> None:
        while run.poll() is None and len(read_steps(folder)) < count and time.monotonic() < deadline_s:
            time.sleep(POLL_S)

    wait_for_steps(1)
    with planted.disturb(folder):
        wait_for_steps(planted.steps - 1)
    try:
        run.wait(max(1.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        return


def diagnose(name: str, planted: PlantedRun, folder: Path) -> Diagnosis:
    """Explain the run, and simulate which change would speed it up most."""
    recorded = read_recorded(folder)
    try:
        timings = calibrate([recorded]).timings
        best_change = simulate_changes(SimulatedSettings.from_config(recorded.config), timings)[0]
    except AsyncGrpoError:
        best_change = None
    return Diagnosis(name, planted, explain_run(recorded), best_change)


def make_table(diagnoses: Sequence[Diagnosis]) -> Table:
    """Make a table with a row per run."""
    correct = sum(diagnosis.is_correct for diagnosis in diagnoses)
    table = Table(title=f"{correct} of {len(diagnoses)} causes named", title_justify="left")
    for column in ("planted", "by", "named", "share", "best change, simulated"):
        table.add_column(column, justify="right" if column == "share" else "left")
    for diagnosis in diagnoses:
        named = diagnosis.explanation.cause.value
        if not diagnosis.is_correct:
            named += "[bold] (wrong)[/]"
        best = ""
        if diagnosis.best_change is not None:
            best = f"{diagnosis.best_change.label} {diagnosis.best_change.speedup - 1:+.0%}"
        table.add_row(diagnosis.name, diagnosis.planted.method, named, f"{diagnosis.explanation.share:.0%}", best)
    return table


def main() -> None:
    """Do the missing runs, and print the table and the advice. Exits with 1 unless all causes are named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planted")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; they stay")
    parser.add_argument("--only", action="append", choices=sorted(PLANTED), help="only this cause; may be repeated")
    options = parser.parse_args()
    configure_logging("bench")

    out = options.out.absolute()
    setup = PipelineSetup(out, out / "model", POLICY, CoreSplit((), ()))
    if not setup.model.exists():
        setup.folder.mkdir(parents=True, exist_ok=True)
        number_model(setup.model, POLICY, VOCABULARY)

    console = Console(width=140)
    names = options.only or list(PLANTED)
    diagnoses: list[Diagnosis] = []
    for name in names:
        try:
            folder = do_run(name, PLANTED[name], setup)
            diagnosis = diagnose(name, PLANTED[name], folder)
        except (ConfigError, RoleFailed) as error:  # continue with the other runs
            console.print(f"{name}: {error}", highlight=False)
        else:
            diagnoses.append(diagnosis)
            console.print(f"{name}: {diagnosis.explanation.cause.value}", highlight=False)

    console.print(make_table(diagnoses))
    for diagnosis in diagnoses:
        console.print(f"{diagnosis.name}: {ADVICE[diagnosis.explanation.cause]}.", highlight=False)
    sys.exit(0 if sum(diagnosis.is_correct for diagnosis in diagnoses) == len(names) else 1)


if __name__ == "__main__":
    main()
