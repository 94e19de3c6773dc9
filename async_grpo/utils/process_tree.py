"""Processes in /proc: their descent and their memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PROC = Path("/proc")


def rss_bytes(pid: int) -> int:
    """Resident memory of a process, including all of its shared pages; 0 if it is gone."""
    try:
        return int((_PROC / str(pid) / "statm").read_bytes().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def pss_bytes(pid: int) -> int:
    """Resident memory of a process, including its share of shared pages. Slower to read than `rss_bytes`."""
    try:
        rollup = (_PROC / str(pid) / "smaps_rollup").read_bytes()
    except OSError:
        return rss_bytes(pid)
    for line in rollup.splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) << 10
    return 0


def parents() -> dict[int, int]:
    """Return the parent of every visible process, by process id."""
    with os.scandir(_PROC) as entries:
        names = [entry.name for entry in entries if entry.name.isdigit()]
    parents: dict[int, int] = {}
    for name in names:
        parent = _read_parent(name)
        if parent is not None:
            parents[int(name)] = parent
    return parents


def own_children() -> list[int]:
    """Return the children of this process, from the kernel's list if it has one, else from the process table."""
    me = os.getpid()
    try:
        return [int(pid) for pid in (_PROC / "self" / "task" / str(me) / "children").read_bytes().split()]
    except OSError:
        return [pid for pid, parent in parents().items() if parent == me]


def descendants(root: int, parents: Mapping[int, int]) -> list[int]:
    """Return the children of `root`, their children, and so on. `parents` maps process id to parent."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    result: list[int] = []
    generation = [root]
    while generation:
        generation = [child for pid in generation for child in children.get(pid, []) if child != root]
        result += generation
    return result


def _read_parent(name: str) -> int | None:
    """Return the parent of a process: the fourth field of /proc/<pid>/stat; None if the process is gone.

    The second field, a name in brackets, may contain any characters. Does not use pathlib, which would take most of the
    time: there may be thousands of processes.
    """
    try:
        descriptor = os.open(f"/proc/{name}/stat", os.O_RDONLY)
    except OSError:
        return None
    try:
        return int(os.read(descriptor, 1024).rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return None
    finally:
        os.close(descriptor)
