"""Files in shared memory: their paths, and whether there is room for them."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from contextlib import suppress
from pathlib import Path

from async_grpo.errors import WeightsError

SHARED_MEMORY = Path("/dev/shm")
PAGE = 4096
_MEMINFO = Path("/proc/meminfo")


def run_folder(run: str) -> Path:
    """The folder of a run in shared memory."""
    return SHARED_MEMORY / f"async-grpo-{run}"


def store_path(run: str, name: str) -> Path:
    """The path of the store `name` of a run."""
    return run_folder(run) / f"{name}.weights"


def remove_stores(run: str) -> None:
    """Remove the stores of `run` that are left; processes that still map them keep their pages."""
    shutil.rmtree(run_folder(run), ignore_errors=True)


def page_up(count: int) -> int:
    """`count` rounded up to whole pages."""
    return -(-count // PAGE) * PAGE


def allocate(path: Path, size: int) -> tuple[int, mmap.mmap]:
    """Create a file of `size` bytes; returns its descriptor and its memory. All pages are allocated here, because the
    first access to a page is slow. Raises WeightsError, with the sizes, if there is no room."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    check_room(path, size)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        return descriptor, mmap.mmap(descriptor, size, flags=flags)
    except BaseException as error:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            check_room(path, size)
        raise


def check_room(path: Path, size: int) -> None:
    """Raise WeightsError if the file system, or the memory behind it, has no room for `size` more bytes."""
    free = shutil.disk_usage(path.parent).free
    if free < size:
        raise WeightsError(
            f"a weight store of {size} bytes (its slots hold the whole model each) does not fit into {path.parent}: "
            f"{free} bytes are free, {size - free} too few. Free or enlarge it "
            "(mount -o remount,size=..., docker run --shm-size=...)."
        )
    available = _available_bytes()
    if available is not None and available < size:
        raise WeightsError(
            f"a weight store of {size} bytes (its slots hold the whole model each) does not fit into memory: "
            f"{available} bytes are available, {size - available} too few. Free memory, or use a machine with more: "
            f"pages of {path.parent} cannot be given back while they are in use."
        )


def _available_bytes() -> int | None:
    with suppress(OSError):
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
