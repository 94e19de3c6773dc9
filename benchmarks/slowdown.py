"""`python -m benchmarks.slowdown trainer|server --out DIR`: one side of a run becomes five times as slow in its middle.

Real runs of a shipped configuration, one for each fixed S and one with max_staleness: auto. From step `--at` on, the
processes of that side get a fifth of their time: SIGSTOP for 80 ms, SIGCONT for 20 ms, again and again. The table has
the speed from 20 steps later on, when auto must have found its place, and the ages of the whole run beside their bound.
A run that is there is not made again.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from async_grpo.telemetry.jsonl import read_rows
from async_grpo.telemetry.rows import Row, latest_rows, number, numbers, rows_of_kind, tokens_per_s

ROLES = {"trainer": "trainer.main", "server": "rollout_server.main"}
PERIOD_S, SHARE = 0.1, 0.2
"""How often a process is stopped, and the share of the time in which it runs."""
PERIODS = 20
"""Periods between two looks at the run, which take a while themselves."""
SETTLE = 20
"""Steps after the change that do not count."""
LONGEST_S = 600.0


def processes(role: str, run: Path, name: str = "") -> list[int]:
    """The role's process (of the servers, that of this name) and everything that it started, by /proc."""
    parents, roots = {}, []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
        if ROLES[role] in words and any(str(run) in word for word in words) and (not name or name in words):
            roots.append(int(folder.name))
    found = list(roots)
    for one in found:
        found += [child for child, parent in parents.items() if parent == one and child not in found]
    return found


def send(pids: Sequence[int], number: signal.Signals) -> None:
    """Send a signal to those that are still there."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def slow_down(pids: Sequence[int]) -> None:
    """Let the processes run for a fifth of the next two seconds."""
    began_s = time.monotonic()
    for period in range(PERIODS):
        send(pids, signal.SIGSTOP)
        _sleep_until(began_s + (period + 1 - SHARE) * PERIOD_S)
        send(pids, signal.SIGCONT)
        _sleep_until(began_s + (period + 1) * PERIOD_S)


def _sleep_until(moment_s: float) -> None:
    time.sleep(max(0.0, moment_s - time.monotonic()))


def make(config: str, staleness: str, side: str, at: int, steps: int, runs: Path) -> Path:
    """Do the run, with the side slowed down from step `at` on."""
    folder = runs / f"s-{staleness}"
    if (folder / "summary.json").exists():
        return folder
    dials = [f"max_staleness={staleness}", f"steps={steps}", f"runs_dir={runs}", f"name={folder.name}"]
    options = [word for dial in [*dials, "eval.every_steps=0", "eval.samples=1"] for word in ("-o", dial)]
    command = [sys.executable, "-m", "async_grpo", "run", config, *options]
    began_s = time.monotonic()
    with (runs / f"{folder.name}.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as run:
        while run.poll() is None:
            if time.monotonic() - began_s > LONGEST_S:
                run.terminate()
                raise SystemExit(f"{folder} took more than {LONGEST_S:g} s: see {runs / folder.name}.log")
            rows = steps_of(folder)
            if not rows or not at <= rows[-1]["step"] < steps - 1:
                time.sleep(PERIOD_S)
                continue
            slow_down(processes(side, folder))
    return folder


def steps_of(folder: Path) -> list[Row]:
    """The run's step rows so far."""
    file = folder / "metrics.jsonl"
    return latest_rows(rows_of_kind(read_rows(file), "step"), "step") if file.exists() else []


def counted(rows: Sequence[Row], at: int, bound: int) -> Sequence[Row]:
    """The steps whose speed counts: 20 after the change, and while there was something to admit."""
    return [row for row in rows if at + SETTLE < row["step"] <= rows[-1]["step"] - bound - 1]


def main() -> None:
    """Do the runs that are missing, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slowdown")
    parser.add_argument("side", choices=sorted(ROLES))
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; they stay")
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--staleness", default="0,1,2,4,8,auto")
    parser.add_argument("--at", type=int, default=30)
    parser.add_argument("--steps", type=int, default=80)
    typed = parser.parse_args()
    runs: Path = (typed.out / typed.side).absolute()
    runs.mkdir(parents=True, exist_ok=True)
    bound = max([8, *(int(one) for one in typed.staleness.split(",") if one.isdecimal())])
    table = Table(title=f"{typed.side} five times as slow from step {typed.at} on", title_justify="left")
    for column in ("S", "tokens/s before", "tokens/s after", "mean age after", "largest age", "effective S"):
        table.add_column(column, justify="right")
    for staleness in typed.staleness.split(","):
        rows = steps_of(make(typed.config, staleness, typed.side, typed.at, typed.steps, runs))
        before = [row for row in rows if 10 < row["step"] <= typed.at]
        after = counted(rows, typed.at, bound)
        forces = numbers(rows, "staleness")
        ages = sum((number(row, "age_mean") or 0) * (number(row, "trained_tokens") or 0) for row in after)
        table.add_row(
            staleness,
            *(f"{tokens_per_s(part) or 0:,.0f}" for part in (before, after)),
            f"{ages / sum(numbers(after, 'trained_tokens')):.2f}",
            f"{max(numbers(rows, 'age_max')):.0f}",
            f"{min(forces):.0f} to {max(forces):.0f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
