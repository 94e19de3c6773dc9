"""One run of a side: started in fresh processes, read from its files, and its pace.

    ours   async-grpo run <workload>.yaml ...                  --> <out>/<name>/metrics.jsonl
    trl    .venv/bin/python -m benchmarks.trl.trl_side SPEC    --> <out>/rows.jsonl, one file a rank

Both inherit the cores that this process is bound to. A side that takes longer than `TIMEOUT_S` is ended.
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
from async_grpo.lab.bench.pipeline.observe import Generated, RunRecord, check_one_go, read_record, tokens_within
from benchmarks.trl.workloads import HERE, WORKLOADS, TrlDials, Workload

TIMEOUT_S = 1800.0
TRL_PYTHON = HERE / ".venv/bin/python"
ASYNC_GRPO = Path(sys.executable).parent / "async-grpo"
ROOT = HERE.parent.parent


@dataclass(frozen=True, slots=True)
class TrlStep:
    """One optimizer step, on either side."""

    step: int
    ended_s: float
    """Unix time."""
    samples: int
    reward_mean: float
    completion_tokens: int
    busy_s: float
    """Seconds in which the trainer works: all but waiting for completions, or generating them."""


@dataclass(frozen=True, slots=True)
class SideRun:
    """One run of one side."""

    side: str
    started_s: float
    """Unix time at which its first process was started."""
    steps: tuple[TrlStep, ...]
    made: tuple[Generated, ...] | None = None
    """Every group; None where each step generates what it trains."""

    @property
    def start_up_s(self) -> float:
        """Seconds until the first step has ended."""
        return self.steps[0].ended_s - self.started_s

    def curve(self) -> list[tuple[float, float]]:
        """(Seconds since the start, mean reward) of every step."""
        return [(step.ended_s - self.started_s, step.reward_mean) for step in self.steps]


@dataclass(frozen=True, slots=True)
class Pace:
    """The speed of a run in its counted steps. Samples and tokens count only as far as they were also generated in that
    time."""

    samples_per_s: float
    tokens_per_s: float
    """Completion tokens."""
    step_s: float
    busy_share: float
    """Share of the time in which the trainer works."""
    tokens_mean: float
    """Mean tokens of a completion."""
    generated: float
    """Tokens generated in that time to tokens trained in it: below 1 where a lead was used up."""


def our_side(staleness: int) -> str:
    """The name of our side in tables and pictures."""
    return f"ours, S={staleness}"


def run_ours(workload: Workload, out: Path, staleness: int, overrides: Sequence[str] = ()) -> SideRun:
    """Do one run of this project. Raises RoleFailed if it fails."""
    name = f"ours-S{staleness}"
    config = workload.config(out, name, [f"max_staleness={staleness}", *overrides])
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{name}.yaml"
    file.write_text(dump(config), encoding="utf-8")
    started_s = time.time()
    _run([str(ASYNC_GRPO), "run", str(file), "--fresh"], out / f"{name}.log", {}, TIMEOUT_S)
    record = read_record(config.run_dir)
    made = tuple(group for server in record.servers for group in server.groups)
    return SideRun(our_side(staleness), started_s, our_steps(record, config.group_size, name), made)


def run_trl(workload: Workload, out: Path, *, timeout_s: float = TIMEOUT_S) -> SideRun:
    """Do one run of TRL. Raises RoleFailed if it fails."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("rows*.jsonl"):
        old.unlink()
    workload.write_spec(out)
    started_s = time.time()
    _run(trl_argv(workload.dials, out / "spec.json"), out / "trl.log", trl_environment(workload.dials), timeout_s)
    ranks = [file.read_text(encoding="utf-8").splitlines() for file in sorted(out.glob("rows*.jsonl"))]
    return SideRun("TRL", started_s, trl_steps(ranks))


def trl_steps(lines: Sequence[Sequence[str]]) -> tuple[TrlStep, ...]:
    """The steps of a TRL run from the rows of its processes: each has a share of the samples."""
    ranks = [[json.loads(line) for line in rank] for rank in lines]
    steps, ended_s = [], 0.0
    for parts in zip(*ranks, strict=True):
        samples = sum(part["samples"] for part in parts)
        ended_s, before_s = max(part["time_s"] for part in parts), ended_s
        generated_s = max(part["generate_s"] for part in parts)
        steps.append(
            TrlStep(
                step=parts[0]["step"],
                ended_s=ended_s,
                samples=samples,
                reward_mean=sum(part["reward_mean"] * part["samples"] for part in parts) / samples,
                completion_tokens=sum(part["completion_tokens"] for part in parts),
                busy_s=ended_s - before_s - generated_s if before_s else 0.0,
            )
        )
    return tuple(steps)


def our_steps(record: RunRecord, group_size: int, run: str) -> tuple[TrlStep, ...]:
    """The steps of a run of this project. Raises EngineError if it was not made in one go."""
    check_one_go(record, run)
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


def pace(run: SideRun, skip: int, tail: int) -> Pace:
    """The pace of the steps behind the first `skip` and before the last `tail`. Raises ValueError if none is left."""
    counted = run.steps[skip : len(run.steps) - tail]
    if skip < 1 or not counted:
        raise ValueError(
            f"{run.side}: of {len(run.steps)} steps, {skip} at the beginning and {tail} at the end are not counted, so "
            "nothing is. Run more steps"
        )
    start_s, end_s = run.steps[skip - 1].ended_s, counted[-1].ended_s
    seconds, window = end_s - start_s, [(start_s, end_s)]
    samples = sum(step.samples for step in counted)
    tokens = sum(step.completion_tokens for step in counted)
    generated = 1.0 if run.made is None else sum(tokens_within(group, window) for group in run.made) / tokens
    credited = min(1.0, generated)
    return Pace(
        samples_per_s=credited * samples / seconds,
        tokens_per_s=credited * tokens / seconds,
        step_s=seconds / len(counted),
        busy_share=sum(step.busy_s for step in counted) / seconds,
        tokens_mean=tokens / samples,
        generated=generated,
    )


def command(description: str, out: Path) -> argparse.ArgumentParser:
    """A parser with the options of both commands."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--workload", action="append", choices=sorted(WORKLOADS), help="may be repeated; default: all")
    parser.add_argument("--cores", type=int, nargs="+", help="the cores of a side; default: all of this process")
    parser.add_argument("--out", type=Path, default=out)
    return parser


def bind(cores: Sequence[int] | None) -> None:
    """Bind this process, and so both sides, to these cores (None: leave it as it is); on SIGTERM it exits, which also
    ends a run that is going on."""
    if cores:
        os.sched_setaffinity(0, cores)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def trl_argv(dials: TrlDials, spec: Path) -> list[str]:
    """The command of TRL's side: one process, or one for each rank under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(dials.processes)]
    return [str(TRL_PYTHON), *(launcher if dials.processes > 1 else []), "-m", "benchmarks.trl.trl_side", str(spec)]


def trl_environment(dials: TrlDials) -> dict[str, str]:
    """The environment of TRL's processes; they ask no hub."""
    return {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(dials.threads),
        "ACCELERATE_USE_CPU": "true",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _run(argv: Sequence[str], log: Path, environment: dict[str, str], timeout_s: float) -> None:
    """Wait for the command to end; its process group ends in any case."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv, cwd=ROOT, stdout=output, stderr=output, env=os.environ | environment, start_new_session=True
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise RoleFailed(f"{log.stem} has not ended within {timeout_s:g} s. See {log}") from None
        finally:
            _end(process)
    if code:
        raise RoleFailed(f"{log.stem} ended with exit code {code}. See {log}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM first, so that a run ends its roles; then SIGKILL for the rest of its group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60.0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
