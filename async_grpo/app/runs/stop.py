"""Stop a run of this machine from outside: what Ctrl-C does in its terminal, from any other.

    locks of the run folder --open files of processes--> who holds them --SIGTERM--> wait until all locks are free

The trainer saves a checkpoint, rollout servers store their partial rollouts, and the report is written.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import psutil

from async_grpo.app.runs.run import Run, RunStatus
from async_grpo.errors import ConfigError, WaitTimeout

_LOOK_EVERY_S = 0.2
_AGAIN_AFTER_S = 1.0
"""Seconds between the two signals of `now`."""


def stop_run(run: Run, *, now: bool, timeout_s: float, say: Callable[[str], None]) -> RunStatus:
    """End the processes of this machine that are at work in the run folder; the run's state afterwards.

    `now`: do not wait for unfinished work, as a second Ctrl-C does. Raises ConfigError if its processes are not of this
    machine, or not ours, and WaitTimeout if they do not end in time.
    """
    if run.status() is not RunStatus.LIVE:
        return run.status()
    holders = _holders(run)
    if not holders:
        raise ConfigError(
            f"{run.path} is live, but no process that can be seen from here holds its locks. Stop a run in containers "
            "with `docker compose stop`, a job with scancel or kubectl, and processes of another user as that user"
        )
    _send(holders)
    if now:
        time.sleep(_AGAIN_AFTER_S)
        _send(_holders(run))
    names = ", ".join(str(process) for process in holders)
    say(f"asked process {names} to end; the trainer saves a checkpoint")
    deadline = time.monotonic() + timeout_s
    while run.folder.has_live_process():
        if time.monotonic() > deadline:
            raise WaitTimeout(f"process {names} to end", timeout_s, "`--now` does not wait for unfinished work")
        time.sleep(_LOOK_EVERY_S)
    return run.status()


def _holders(run: Run) -> list[int]:
    """The processes that have a lock of the folder open for writing, by number, without those that one of them has
    forked. Who only looks reads it."""
    locks = {os.path.realpath(lock) for lock in run.folder.lock_files()}
    found: dict[int, set[int]] = {}
    for process in psutil.process_iter():
        try:
            opened = {file.path for file in process.open_files() if file.mode != "r"}
            if opened & locks:
                found[process.pid] = {each.pid for each in process.parents()}
        except (psutil.Error, OSError):
            continue  # it has ended, or is another user's
    return sorted(number for number, parents in found.items() if not parents & found.keys())


def _send(processes: list[int]) -> None:
    for process in processes:
        try:
            os.kill(process, signal.SIGTERM)
        except ProcessLookupError:
            pass
        except PermissionError as error:
            raise ConfigError(f"process {process} belongs to another user. Stop the run as that user") from error
