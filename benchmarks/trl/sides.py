"""Runs one side in fresh processes, reads its files, and computes its pace.

    ours   async-grpo run <workload>.yaml ...                  --> <out>/<name>/metrics.jsonl
    trl    .venv/bin/python -m benchmarks.trl.trl_side SPEC    --> <out>/rows.jsonl, one file per rank

Both sides inherit this process's CPU affinity. A run that takes longer than `TIMEOUT_S` is terminated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from async_grpo.config.load import dump
from async_grpo.errors import RoleFailed
from async_grpo.lab.bench.pipeline.observe import Generated, RunRecord, check_not_restarted, read_record, tokens_within
from benchmarks.trl.workloads import HERE, WORKLOADS, TrlSettings, Workload

TIMEOUT_S = 1800.0
TRL_PYTHON = HERE / ".venv/bin/python"
ASYNC_GRPO = Path(sys.executable).parent / "async-grpo"
ROOT = HERE.parent.parent


@dataclass(frozen=True, slots=True)
class TrlStep:
    """One optimizer step of either side."""

    step: int
    ended_s: float
    """Unix time."""
    samples: int
    reward_mean: float
    completion_tokens: int
    busy_s: float
    """Seconds in which the trainer trains: all but waiting for completions (ours) or generating them (TRL)."""


@dataclass(frozen=True, slots=True)
class SideRun:
    """One run of one side."""

    side: str
    started_s: float
    """Unix time at which the first process was started."""
    steps: tuple[TrlStep, ...]
    groups: tuple[Generated, ...] | None = None
    """Every generated group. None for TRL, which generates in each step what it trains."""

    @property
    def start_up_s(self) -> float:
        """Seconds until the end of the first step."""
        return self.steps[0].ended_s - self.started_s

    def reward_curve(self) -> list[tuple[float, float]]:
        """Return (seconds since the start, mean reward) per step."""
        return [(step.ended_s - self.started_s, step.reward_mean) for step in self.steps]


@dataclass(frozen=True, slots=True)
class Pace:
    """Speed of a run in its counted steps.

    A run that trains more than it generates in that time uses up a lead from before. So samples and tokens beyond those
    generated do not count.
    """

    samples_per_s: float
    tokens_per_s: float
    """Completion tokens."""
    step_s: float
    busy_share: float
    """Fraction of the time in which the trainer trains."""
    tokens_mean: float
    """Mean tokens per completion."""
    generated: float
    """Tokens generated / tokens trained in that time. Below 1 if a lead was used up."""


def name_our_side(staleness: int) -> str:
    """Return the name of our side in tables and plots."""
    return f"ours, S={staleness}"


def run_ours(workload: Workload, out: Path, staleness: int, overrides: Sequence[str] = ()) -> SideRun:
    """Do one run of this project. Raises RoleFailed if it fails."""
    name = f"ours-S{staleness}"
    config = workload.make_config(out, name, [f"max_staleness={staleness}", *overrides])
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{name}.yaml"
    file.write_text(dump(config), encoding="utf-8")

    started_s = time.time()
    _run_command([str(ASYNC_GRPO), "run", str(file), "--fresh"], out / f"{name}.log", {}, TIMEOUT_S)

    record = read_record(config.run_dir)
    steps = make_our_steps(record, config.group_size, name)
    groups = tuple(group for server in record.servers for group in server.groups)
    return SideRun(name_our_side(staleness), started_s, steps, groups)


def run_trl(workload: Workload, out: Path, *, timeout_s: float = TIMEOUT_S) -> SideRun:
    """Do one run of TRL. Raises RoleFailed if it fails."""
    out.mkdir(parents=True, exist_ok=True)
    for old_file in out.glob("rows*.jsonl"):
        old_file.unlink()  # an earlier run may have had more ranks
    workload.write_spec(out)

    settings = workload.trl_settings
    command = make_trl_command(settings, out / "spec.json")
    started_s = time.time()
    _run_command(command, out / "trl.log", make_trl_environment(settings), timeout_s)

    ranks = [file.read_text(encoding="utf-8").splitlines() for file in sorted(out.glob("rows*.jsonl"))]
    return SideRun("TRL", started_s, make_trl_steps(ranks))


def make_trl_steps(lines_by_rank: Sequence[Sequence[str]]) -> tuple[TrlStep, ...]:
    """Merge the rows of all ranks, each of which has some of the samples, into the steps of a TRL run."""
    rows_by_rank = [[json.loads(line) for line in lines] for lines in lines_by_rank]
    steps: list[TrlStep] = []
    for rows in zip(*rows_by_rank, strict=True):
        samples = sum(row["samples"] for row in rows)
        ended_s = max(row["time_s"] for row in rows)
        generate_s = max(row["generate_s"] for row in rows)
        busy_s = 0.0  # of the first step, whose start is not recorded; it is never counted
        if steps:
            busy_s = ended_s - steps[-1].ended_s - generate_s
        steps.append(
            TrlStep(
                step=rows[0]["step"],
                ended_s=ended_s,
                samples=samples,
                reward_mean=sum(row["reward_mean"] * row["samples"] for row in rows) / samples,
                completion_tokens=sum(row["completion_tokens"] for row in rows),
                busy_s=busy_s,
            )
        )
    return tuple(steps)


def make_our_steps(record: RunRecord, group_size: int, run: str) -> tuple[TrlStep, ...]:
    """Return the steps of a run of this project. Raises EngineError if the run was interrupted and resumed."""
    check_not_restarted(record, run)
    return tuple(
        TrlStep(
            step=row["step"],
            ended_s=row["time_s"],
            samples=row["groups"] * group_size,
            reward_mean=row["reward_mean"],
            completion_tokens=round(row["completion_tokens_mean"] * row["groups"] * group_size),
            busy_s=row["step_s"] - row["wait_s"],
        )
        for row in record.steps
    )


def compute_pace(run: SideRun, skip: int, tail: int) -> Pace:
    """Compute the pace without the first `skip` and the last `tail` steps. Raises ValueError if no step is left."""
    counted = run.steps[skip : len(run.steps) - tail]
    if skip < 1 or not counted:
        raise ValueError(
            f"{run.side}: of {len(run.steps)} steps, {skip} at the beginning and {tail} at the end are not counted, so "
            "no step is left. Run more steps"
        )

    start_s = run.steps[skip - 1].ended_s
    end_s = counted[-1].ended_s
    seconds = end_s - start_s
    samples = sum(step.samples for step in counted)
    tokens = sum(step.completion_tokens for step in counted)

    generated = 1.0
    if run.groups is not None:
        generated = sum(tokens_within(group, [(start_s, end_s)]) for group in run.groups) / tokens
    credit = min(1.0, generated)
    return Pace(
        samples_per_s=credit * samples / seconds,
        tokens_per_s=credit * tokens / seconds,
        step_s=seconds / len(counted),
        busy_share=sum(step.busy_s for step in counted) / seconds,
        tokens_mean=tokens / samples,
        generated=generated,
    )


def make_parser(description: str, out: Path) -> argparse.ArgumentParser:
    """Make a parser with the options that both commands have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--workload", action="append", choices=sorted(WORKLOADS), help="may be repeated; default: all")
    parser.add_argument("--cores", type=int, nargs="+", help="cores of each side; default: all of this process")
    parser.add_argument("--out", type=Path, default=out)
    return parser


def bind_cores(cores: Sequence[int] | None) -> None:
    """Bind this process, and so both sides, to `cores`; None keeps the present affinity.

    Also makes SIGTERM raise SystemExit, so that the `finally` of `_run_command` terminates the current run.
    """
    if cores:
        os.sched_setaffinity(0, cores)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def make_trl_command(settings: TrlSettings, spec: Path) -> list[str]:
    """Return TRL's command line: one process, or torchrun with several ranks."""
    command = [str(TRL_PYTHON)]
    if settings.processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(settings.processes)]
    return [*command, "-m", "benchmarks.trl.trl_side", str(spec)]


def make_trl_environment(settings: TrlSettings) -> dict[str, str]:
    """Return the environment variables of TRL's processes, which use no hub."""
    return {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(settings.threads),
        "ACCELERATE_USE_CPU": "true",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _run_command(command: Sequence[str], log: Path, environment: dict[str, str], timeout_s: float) -> None:
    """Run the command and wait for its end. Raises RoleFailed. Its process group is gone in any case."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, env=os.environ | environment, start_new_session=True
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise RoleFailed(f"{log.stem} has not ended within {timeout_s:g} s. See {log}") from None
        finally:
            _terminate(process)
    if code:
        raise RoleFailed(f"{log.stem} ended with exit code {code}. See {log}")


def _terminate(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, so that a run can stop its roles, then SIGKILL to the rest of the process group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60.0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
