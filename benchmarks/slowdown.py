"""`python -m benchmarks.slowdown trainer|server --out DIR`: slow down one side of a run to a fifth of its speed.

Does real runs of a shipped configuration, one per fixed S and one with `max_staleness: auto`. From step `--at` on, the
processes of that side run a fifth of the time: SIGSTOP for 80 ms, SIGCONT for 20 ms, repeatedly. The table has the
speeds before and after (counted from 20 steps after the change, when `auto` must have adapted), and the ages of trained
tokens. Runs that exist already are not repeated.
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
"""Module of each side's processes."""
PERIOD_S = 0.1
"""Seconds of one stop and the run time after it."""
RUNNING_FRACTION = 0.2
"""Fraction of the period in which the process runs."""
PERIODS = 20
"""Periods per call of `slow_down`. Reading the run's rows in between takes time, so they are read rarely."""
SETTLING_STEPS = 20
"""Steps after the change that do not count."""
RUN_TIMEOUT_S = 600.0


def find_processes(role: str, run: Path, name: str | None = None) -> list[int]:
    """Return the PIDs of a role of `run` and of all its descendants, from /proc.

    With `name`, only the rollout server of this name.
    """
    parents: dict[int, int] = {}
    pids: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_text().split("\0")
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # the process has ended
        if ROLES[role] not in arguments or not any(str(run) in argument for argument in arguments):
            continue
        if name is None or name in arguments:
            pids.append(int(folder.name))

    for pid in pids:  # grows while we iterate, so grandchildren are found too
        pids += [child for child, parent in parents.items() if parent == pid and child not in pids]
    return pids


def send_signal(pids: Sequence[int], number: signal.Signals) -> None:
    """Send a signal to the processes that still exist."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def slow_down(pids: Sequence[int]) -> None:
    """Let the processes run for only a fifth of the next two seconds."""
    started_s = time.monotonic()
    for period in range(PERIODS):
        send_signal(pids, signal.SIGSTOP)
        _sleep_until(started_s + (period + 1 - RUNNING_FRACTION) * PERIOD_S)
        send_signal(pids, signal.SIGCONT)
        _sleep_until(started_s + (period + 1) * PERIOD_S)


def _sleep_until(time_s: float) -> None:
    time.sleep(max(0.0, time_s - time.monotonic()))


def do_run(config: str, staleness: str, side: str, at: int, steps: int, runs: Path) -> Path:
    """Do one run, slowing down `side` from step `at` on. Returns its folder; does nothing if the run is complete."""
    folder = runs / f"s-{staleness}"
    if (folder / "summary.json").exists():
        return folder

    command = [sys.executable, "-m", "async_grpo", "run", config]
    for override in (
        f"max_staleness={staleness}",
        f"steps={steps}",
        f"runs_dir={runs}",
        f"name={folder.name}",
        "eval.every_steps=0",
        "eval.samples=1",
    ):
        command += ["-o", override]

    started_s = time.monotonic()
    with (runs / f"{folder.name}.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as run:
        while run.poll() is None:
            if time.monotonic() - started_s > RUN_TIMEOUT_S:
                run.terminate()
                raise SystemExit(f"{folder} took more than {RUN_TIMEOUT_S:g} s. See {runs / folder.name}.log")
            rows = read_steps(folder)
            if not rows or not at <= rows[-1]["step"] < steps - 1:
                time.sleep(PERIOD_S)
                continue
            # The processes are looked up every time, because a restarted role has new PIDs.
            slow_down(find_processes(side, folder))
    return folder


def read_steps(folder: Path) -> list[Row]:
    """Read the step rows that the run has written so far."""
    file = folder / "metrics.jsonl"
    if not file.exists():
        return []
    return latest_rows(rows_of_kind(read_rows(file), "step"), "step")


def select_settled_steps(rows: Sequence[Row], at: int, bound: int) -> Sequence[Row]:
    """Return the steps whose speed counts.

    Excluded are the first 20 steps after the change, and the last steps, for which no new groups are admitted.
    """
    return [row for row in rows if at + SETTLING_STEPS < row["step"] <= rows[-1]["step"] - bound - 1]


def main() -> None:
    """Do the missing runs and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slowdown")
    parser.add_argument("side", choices=sorted(ROLES))
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; they stay")
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--staleness", default="0,1,2,4,8,auto")
    parser.add_argument("--at", type=int, default=30)
    parser.add_argument("--steps", type=int, default=80)
    options = parser.parse_args()

    runs: Path = (options.out / options.side).absolute()
    runs.mkdir(parents=True, exist_ok=True)
    values = options.staleness.split(",")
    # All runs count the same steps: those that the largest S allows. `auto` goes up to 8.
    bound = max([8, *(int(value) for value in values if value.isdecimal())])

    table = Table(title=f"{options.side} five times as slow from step {options.at} on", title_justify="left")
    for column in ("S", "tokens/s before", "tokens/s after", "mean age after", "largest age", "effective S"):
        table.add_column(column, justify="right")
    for staleness in values:
        rows = read_steps(do_run(options.config, staleness, options.side, options.at, options.steps, runs))
        before = [row for row in rows if 10 < row["step"] <= options.at]
        after = select_settled_steps(rows, options.at, bound)
        effective = numbers(rows, "staleness")
        table.add_row(
            staleness,
            f"{tokens_per_s(before) or 0:,.0f}",
            f"{tokens_per_s(after) or 0:,.0f}",
            f"{compute_mean_age(after):.2f}",
            f"{max(numbers(rows, 'age_max')):.0f}",
            f"{min(effective):.0f} to {max(effective):.0f}",
        )
    Console(width=120).print(table)


def compute_mean_age(rows: Sequence[Row]) -> float:
    """Return the mean age per trained token."""
    ages = sum((number(row, "age_mean") or 0) * (number(row, "trained_tokens") or 0) for row in rows)
    return ages / sum(numbers(rows, "trained_tokens"))


if __name__ == "__main__":
    main()
