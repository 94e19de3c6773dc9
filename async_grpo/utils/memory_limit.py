"""Memory limit of this process's cgroup: that of its container, its Slurm job or its systemd unit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil


def total_memory() -> int:
    """Bytes of memory that this process may use at most: the machine's, or less by the limit of its cgroup."""
    total, limit = psutil.virtual_memory().total, cgroup_memory_limit()
    return total if limit is None else min(total, limit)


def available_memory() -> int:
    """Bytes that are available without swapping, bounded by the limit of this process's cgroup. What the cgroup uses
    already is not subtracted: much of it is cached files."""
    return min(psutil.virtual_memory().available, total_memory())


def cgroup_memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes of memory that this process and its siblings may use together; None without a limit.

    psutil shows the memory of the whole machine in a container too, whose kernel kills what exceeds the limit. Limits
    of all parents hold as well. cgroup v1 has a number near 2**63 where there is no limit.
    """
    file = root / "proc/self/cgroup"
    lines = file.read_text().splitlines() if file.is_file() else []
    return min((limit for line in lines for limit in _limits(line, root / "sys/fs/cgroup")), default=None)


def _limits(line: str, folder: Path) -> Iterator[int]:
    """Limits of one line of /proc/self/cgroup (NUMBER:CONTROLLERS:PATH; no controllers: cgroup v2) and its parents."""
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
