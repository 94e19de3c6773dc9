"""Two promises that a Linux process can make about its family, so that no run leaves an orphan."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

MARK_VARIABLE = "ASYNC_GRPO_ROLE_MARK"
"""In the environment of every role and its children: whose they are, and with whom they end."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(with_signal: int = signal.SIGKILL) -> None:
    """The kernel sends this process `with_signal` when the thread that started it ends.

    Call it first thing in a child (or as `preexec_fn`). A parent that is gone already counts.
    """
    parent = os.getppid()
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
