"""Processes as the kernel lists them in /proc: who descends from whom, and how much memory they hold."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PROC = Path("/proc")


def rss_bytes(pid: int) -> int:
    """Resident memory of a process, with all of its shared pages; 0 if it is gone."""
    try:
        return int((_PROC / str(pid) / "statm").read_bytes().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def pss_bytes(pid: int) -> int:
    """Resident memory of a process, with its share of shared pages; takes longer to read than `rss_bytes`."""
    try:
        rollup = (_PROC / str(pid) / "smaps_rollup").read_bytes()
    except OSError:
        return rss_bytes(pid)
    return next((int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith(b"Pss:")), 0)


def parents() -> dict[int, int]:
    """The parent of every visible process, by process id."""
    with os.scandir(_PROC) as entries:
        names = [entry.name for entry in entries if entry.name.isdigit()]
    found = {int(name): _parent(name) for name in names}
    return {pid: parent for pid, parent in found.items() if parent is not None}


def own_children() -> list[int]:
    """The children of this process, from the kernel's list if it keeps one, else from the whole process table."""
    me = os.getpid()
    try:
        return [int(pid) for pid in (_PROC / "self" / "task" / str(me) / "children").read_bytes().split()]
    except OSError:
        return [pid for pid, parent in parents().items() if parent == me]


def descendants(root: int, parents: Mapping[int, int]) -> list[int]:
    """The children of `root`, their children, and so on; `parents` maps process id to parent."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    generation = [root]
    while generation:
        generation = [child for pid in generation for child in children.get(pid, []) if child != root]
        found += generation
    return found


def _parent(name: str) -> int | None:
    """The fourth field of /proc/<pid>/stat; the second, a name in brackets, may contain any characters.

    Does not use pathlib, which would take most of the time: there may be thousands of processes.
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
