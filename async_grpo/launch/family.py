"""Finding and ending what a dead role left behind.

Every role is started in a process group of its own, with a mark in its environment. Its children inherit both, unless
they leave the group or write their title over their environment (vLLM's engine does). The supervisor adopts orphans:
so whatever a killed role had started is found and ended.
"""

from __future__ import annotations

import contextlib
import os

import psutil

from async_grpo.process import MARK_VARIABLE as MARK_VARIABLE

_GRACE_S = 5.0


def mark(run: str, role: str = "") -> str:
    """What identifies the processes of one role of one supervisor; without a role, what its roles share."""
    return f"{os.getpid()}/{run}/{role}"


def end_family(value: str, group: int | None = None) -> int:
    """SIGKILL every descendant that carries the mark, or is in the group, and reap it; returns how many there were.

    Python's resource trackers among them end by themselves after the last of the others, and remove what those have
    left in shared memory; they are killed only if they do not.
    """
    left = [process for process in psutil.Process().children(recursive=True) if _belongs(process, value, group)]
    trackers = [process for process in left if _is_tracker(process)]
    killed = [process for process in left if process not in trackers]
    _kill(killed)
    _kill(psutil.wait_procs(trackers, timeout=_GRACE_S)[1])
    for process in left:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
    return len(left)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_GRACE_S)


def _is_tracker(process: psutil.Process) -> bool:
    """Of `multiprocessing`: it knows the semaphores and shared memory of all processes that one role has spawned."""
    try:
        return any("multiprocessing.resource_tracker" in argument for argument in process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _belongs(process: psutil.Process, value: str, group: int | None) -> bool:
    try:
        return os.getpgid(process.pid) == group or process.environ().get(MARK_VARIABLE) == value
    except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
        return False
