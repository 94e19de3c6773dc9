"""Finding and ending what a dead role left behind.

Every role is started with a mark in its environment, which its children inherit, and the
supervisor adopts orphans: so whatever a killed role had started is found and ended.
"""

from __future__ import annotations

import contextlib
import os

import psutil

from async_grpo.process import MARK_VARIABLE as MARK_VARIABLE

_GRACE_S = 5.0


def mark(run: str, role: str) -> str:
    """What identifies the processes of one role of one supervisor."""
    return f"{os.getpid()}/{run}/{role}"


def end_marked(value: str) -> int:
    """SIGKILL every descendant that carries the mark and reap it; returns how many there were."""
    left = [process for process in psutil.Process().children(recursive=True) if _carries(process, value)]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=_GRACE_S)
    for process in left:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
    return len(left)


def _carries(process: psutil.Process, value: str) -> bool:
    try:
        return process.environ().get(MARK_VARIABLE) == value
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
