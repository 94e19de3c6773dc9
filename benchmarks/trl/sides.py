"""Running one side once, in fresh processes, and reading what it wrote.

    ours   async-grpo run <workload>.yaml ...                  --> <out>/<name>/metrics.jsonl
    trl    .venv/bin/python -m benchmarks.trl.trl_side SPEC    --> <out>/rows.jsonl, one file a rank

Both inherit the cores that this process is bound to. A side that takes longer than `TIMEOUT_S` is ended.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from async_grpo.config.load import dump
from async_grpo.errors import RoleFailed
from benchmarks.trl.records import SideRun, TrlDials, our_groups, our_steps, trl_steps
from benchmarks.trl.workloads import HERE, Workload

TIMEOUT_S = 1800.0
TRL_PYTHON = HERE / ".venv/bin/python"
ASYNC_GRPO = Path(sys.executable).parent / "async-grpo"
ROOT = HERE.parent.parent


def our_side(staleness: int) -> str:
    """Its name in tables and pictures."""
    return f"ours, S={staleness}"


def run_ours(workload: Workload, out: Path, staleness: int, overrides: Sequence[str] = ()) -> SideRun:
    """One run of this project. Raises RoleFailed if it fails."""
    name = f"ours-S{staleness}"
    config = workload.config(out, name, [f"max_staleness={staleness}", *overrides])
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{name}.yaml"
    file.write_text(dump(config), encoding="utf-8")
    started_s = time.time()
    _run([str(ASYNC_GRPO), "run", str(file), "--fresh"], out / f"{name}.log", {}, TIMEOUT_S)
    steps = our_steps(_lines(config.run_dir / "metrics.jsonl"), config.group_size)
    timelines = sorted((config.run_dir / "timeline").glob("rollout-*.jsonl"))
    made = tuple(group for timeline in timelines for group in our_groups(_lines(timeline)))
    return SideRun(our_side(staleness), started_s, steps, made)


def run_trl(workload: Workload, out: Path, *, timeout_s: float = TIMEOUT_S) -> SideRun:
    """One run of TRL. Raises RoleFailed if it fails."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("rows*.jsonl"):
        old.unlink()
    workload.spec(out).write(out / "spec.json")
    started_s = time.time()
    _run(trl_argv(workload.dials, out / "spec.json"), out / "trl.log", trl_environment(workload.dials), timeout_s)
    files = sorted(out.glob("rows*.jsonl"))
    return SideRun("TRL", started_s, trl_steps([_lines(file) for file in files]))


def add_cores(parser: argparse.ArgumentParser) -> None:
    """The option of both commands."""
    parser.add_argument("--cores", type=int, nargs="+", help="the cores of a side; default: all of this process")


def bind(cores: Sequence[int] | None) -> None:
    """This process, and so both sides, to those cores; None leaves it as it is."""
    if cores:
        os.sched_setaffinity(0, cores)


def end_children_on_sigterm() -> None:
    """SIGTERM becomes an exit, in which a run that is going on is ended, too."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def trl_argv(dials: TrlDials, spec: Path) -> list[str]:
    """One process, or one a rank under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(dials.processes)]
    return [str(TRL_PYTHON), *(launcher if dials.processes > 1 else []), "-m", "benchmarks.trl.trl_side", str(spec)]


def trl_environment(dials: TrlDials) -> dict[str, str]:
    """What TRL's processes look at beside the spec: nothing is asked of a hub."""
    return {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(dials.threads),
        "ACCELERATE_USE_CPU": "true",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _run(argv: Sequence[str], log: Path, environment: dict[str, str], timeout_s: float) -> None:
    """To its end; whatever happens, the process group ends with it."""
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
    """SIGTERM first, so that a run takes down its roles; then whatever is left of its group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60.0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
