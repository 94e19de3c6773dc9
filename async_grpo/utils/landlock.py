"""Hides a folder of secrets from processes that run foreign code, with Landlock (Linux 5.13 or newer).

    hide_folder("/run/secrets")

    readable      /bin, /dev, /etc, ..., /run/lock, ...
    unreadable    /run/secrets, files that are created in / and /run later

Landlock lists what a process may open, not what it may not. So we allow every entry of `/` except for `/run`, and every
entry of `/run` except for `secrets`. A process with such a rule cannot look into a process without it either, so it
cannot read the server's environment, which has the secrets too, in /proc (unless it has CAP_PERFMON, as root outside
containers).
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Numbers of the system calls, on all architectures."""
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_READ_FILE = 1 << 2
_PR_SET_NO_NEW_PRIVS = 38


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def can_hide_folders() -> bool:
    """Return True if the kernel, and the container's filter of system calls, allow Landlock."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG) > 0


def hide_folder(folder: Path) -> None:
    """Make the files in `folder` unreadable for this thread and all processes that it starts, for good.

    Raises OSError if the kernel refuses.
    """
    rules = _Ruleset(_READ_FILE)
    ruleset = _call(_CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(ctypes.sizeof(rules)), 0)
    try:
        for path in _list_allowed(folder.resolve()):
            _allow_reading(ruleset, path)
        # Without it, only root may restrict itself: a setuid program must not run with less than it expects.
        ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _list_allowed(hidden: Path) -> list[Path]:
    """Return the entries next to `hidden` and next to each of its parents, without links to one of them."""
    closed = {hidden, *hidden.parents}
    return [entry for parent in hidden.parents for entry in parent.iterdir() if entry.resolve() not in closed]


def _allow_reading(ruleset: int, path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # a broken link, or an entry that is gone
    try:
        rule = _PathBeneath(_READ_FILE, descriptor)
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(descriptor)


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"Landlock, system call {number}: {os.strerror(code)}")
    return result
