"""Settings of the Linux kernel that keep a run from leaving orphans: die with the parent, adopt orphans.

    parent --starts--> python child_process.py PARENT SIGNAL CORES PROGRAM ... --prctl, then exec--> PROGRAM

The child makes the setting itself, in a fresh process: between fork and exec in a parent with threads, Python code may
deadlock on a lock that another thread held.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

MARK_VARIABLE = "ASYNC_GRPO_ROLE_MARK"
"""Environment variable of every role and its children: the role that they belong to and end with."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def run_mark(role_mark: str) -> str:
    """Return the mark of a process that a role starts for all roles of its run. It ends with the last of them."""
    return f"{role_mark.rpartition('/')[0]}/"


def signal_name(number: int) -> str:
    """Return the name of a signal; real-time signals have only a number.

    >>> signal_name(9), signal_name(40)
    ('SIGKILL', 'signal 40')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def child_argv(
    argv: Sequence[str], *, with_signal: signal.Signals = signal.SIGKILL, cores: Sequence[int] = ()
) -> list[str]:
    """Return the command that runs `argv` as a child of the calling thread, on `cores` only; () for all cores.

    The kernel sends the process `with_signal` when the thread that started it ends.
    """
    core_list = ",".join(map(str, cores))
    # Isolated and without site: it needs only the standard library, and starts in a fraction of the time.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(with_signal)), core_list, *argv]


def die_with_parent(parent: int, with_signal: int = signal.SIGKILL) -> None:
    """Have the kernel send this process `with_signal` when the thread that started it ends.

    `parent` is the process id of the parent. If that process has already ended, the signal is sent immediately.
    """
    _prctl(_PR_SET_PDEATHSIG, with_signal)
    # Check after the setting: a parent that ended before it caused no signal.
    if os.getppid() != parent:
        os.kill(os.getpid(), with_signal)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent dies, so that it can end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) was refused")


def _become(parent: str, with_signal: str, cores: str, *argv: str) -> None:
    """Make the settings and become the program; the command of `child_argv` runs this."""
    die_with_parent(int(parent), int(with_signal))
    if cores:
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    # Python ignores these signals, and exec would pass that on to the program.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    _become(*sys.argv[1:])
