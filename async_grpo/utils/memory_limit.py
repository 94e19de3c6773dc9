"""Memory limit of this process's cgroup: of its container, Slurm job or systemd unit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil


def total_memory() -> int:
    """Maximum bytes of memory that this process may use: those of the machine, or the limit of its cgroup."""
    total = psutil.virtual_memory().total
    limit = cgroup_memory_limit()
    return total if limit is None else min(total, limit)


def available_memory() -> int:
    """Bytes that are available without swapping, bounded by the limit of this process's cgroup.

    The memory that the cgroup uses already is not subtracted: much of it is cached files.
    """
    return min(psutil.virtual_memory().available, total_memory())


def cgroup_memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes of memory that this process and its siblings may use together; None without a limit.

    In a container, psutil reports the memory of the whole machine, but the kernel kills processes above the limit of
    the container. The limits of all parent groups apply as well. cgroup v1 has a number near 2**63 if there is no
    limit.
    """
    file = root / "proc/self/cgroup"
    if not file.is_file():
        return None
    limits: list[int] = []
    for line in file.read_text().splitlines():
        limits += _read_limits(line, root / "sys/fs/cgroup")
    return min(limits, default=None)


def _read_limits(line: str, folder: Path) -> Iterator[int]:
    """Yield the limits of one line of /proc/self/cgroup (NUMBER:CONTROLLERS:PATH; v2: no controllers) and its
    parents."""
    _, controllers, path = line.split(":", 2)
    if controllers and "memory" not in controllers.split(","):
        return
    if controllers:
        folder /= "memory"
    own = folder / path.lstrip("/")
    for group in (own, *own.parents):
        if not group.is_relative_to(folder):
            return
        file = group / ("memory.limit_in_bytes" if controllers else "memory.max")
        text = file.read_text().strip() if file.is_file() else "max"
        if text != "max":
            yield int(text)
