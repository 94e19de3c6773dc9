"""Two promises that a Linux process can make about its family, so that no run leaves an orphan.

    parent --starts--> python process.py PARENT SIGNAL CORES PROGRAM ... --asks the kernel, then becomes--> PROGRAM

A child makes its promise itself, in a fresh process: between fork and exec of a parent with threads, Python code may
deadlock on a lock that another thread held.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

MARK_VARIABLE = "ASYNC_GRPO_ROLE_MARK"
"""In the environment of every role and its children: whose they are, and with whom they end."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def run_mark(role_mark: str) -> str:
    """Of what one role starts for all roles of its run: it ends with the last of them."""
    return f"{role_mark.rpartition('/')[0]}/"


def child_argv(
    argv: Sequence[str], *, with_signal: signal.Signals = signal.SIGKILL, cores: Sequence[int] = ()
) -> list[str]:
    """The command that runs `argv` as a child of this process and under its process id: the kernel sends it
    `with_signal` when the thread that has started it ends, and it uses these cores only; () for all."""
    kept_to = ",".join(map(str, cores))
    # Isolated and without site: it needs the standard library alone, and starts in a fraction of the time.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(with_signal)), kept_to, *argv]


def die_with_parent(parent: int, with_signal: int = signal.SIGKILL) -> None:
    """The kernel sends this process `with_signal` when the thread that started it ends.

    `parent`: the process id that the parent has told. One that is gone by now counts, too.
    """
    _prctl(_PR_SET_PDEATHSIG, with_signal)
    if os.getppid() != parent:
        os.kill(os.getpid(), with_signal)


def adopt_orphans() -> None:
    """Descendants whose parent dies become children of this process, which can then end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) was refused")


def _become(parent: str, with_signal: str, cores: str, *argv: str) -> None:
    """What a command of `child_argv` does."""
    die_with_parent(int(parent), int(with_signal))
    if cores:
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):  # and by whatever it becomes, unless reset
        signal.signal(ignored_by_python, signal.SIG_DFL)
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    _become(*sys.argv[1:])
