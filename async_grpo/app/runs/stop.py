"""Stop a run of this machine from another terminal, like Ctrl-C in its own.

    locks of the run folder --open files of processes--> lock holders --SIGTERM--> wait until all locks are free

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

_POLL_EVERY_S = 0.2
_SECOND_SIGNAL_AFTER_S = 1.0
"""Seconds between the two signals of `now`."""


def stop_run(run: Run, *, now: bool, timeout_s: float, report_progress: Callable[[str], None]) -> RunStatus:
    """End the processes of this machine that run in the run folder. Returns the run's state afterwards.

    `now`: do not wait for unfinished work, like a second Ctrl-C. Raises ConfigError if the processes are on another
    machine or belong to another user, WaitTimeout if they do not end in time.
    """
    if run.status() is not RunStatus.LIVE:
        return run.status()
    holders = _find_lock_holders(run)
    if not holders:
        raise ConfigError(
            f"{run.path} is live, but no process visible from here holds its locks. Stop a run in containers "
            "with `docker compose stop`, a job with scancel or kubectl, and processes of another user as that user"
        )
    _send_sigterm(holders)
    if now:
        time.sleep(_SECOND_SIGNAL_AFTER_S)
        _send_sigterm(_find_lock_holders(run))
    names = ", ".join(str(process) for process in holders)
    report_progress(f"asked process {names} to end; the trainer saves a checkpoint")
    deadline = time.monotonic() + timeout_s
    while run.folder.has_live_process():
        if time.monotonic() > deadline:
            raise WaitTimeout(f"process {names} to end", timeout_s, "`--now` does not wait for unfinished work")
        time.sleep(_POLL_EVERY_S)
    return run.status()


def _find_lock_holders(run: Run) -> list[int]:
    """Return the PIDs of the processes that hold a lock of the folder, without their forked children.

    A process that only checks a lock opens it for reading, so only files that are open for writing count.
    """
    locks = {os.path.realpath(lock) for lock in run.folder.lock_files()}
    parents_of: dict[int, set[int]] = {}
    for process in psutil.process_iter():
        try:
            opened = {file.path for file in process.open_files() if file.mode != "r"}
            if opened & locks:
                parents_of[process.pid] = {parent.pid for parent in process.parents()}
        except (psutil.Error, OSError):
            continue  # the process has ended or belongs to another user
    return sorted(pid for pid, parents in parents_of.items() if not parents & parents_of.keys())


def _send_sigterm(processes: list[int]) -> None:
    for process in processes:
        try:
            os.kill(process, signal.SIGTERM)
        except ProcessLookupError:
            pass
        except PermissionError as error:
            raise ConfigError(f"process {process} belongs to another user. Stop the run as that user") from error
