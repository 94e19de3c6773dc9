"""Files in shared memory: paths, permissions, allocation.

    /dev/shm/async-grpo-RUN/
        trainer.weights  ctl-PID  r-TOKEN             the trainer's store, and the sockets of its processes
        node.weights  node.sock  node.lock            the receiver of the machine's rollout servers

The folder's name can be guessed, and every user may create files in /dev/shm. So a folder that another user created or
can write to is refused (`make_private_folder`): that user could choose the weights that the engines load.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from contextlib import suppress
from pathlib import Path

from async_grpo.errors import WeightsError
from async_grpo.utils.files import is_own_folder, make_private_folder

SHARED_MEMORY = Path("/dev/shm")
PAGE = 4096
_MEMINFO = Path("/proc/meminfo")
_TRAINER_FILES = ("trainer.weights", "ctl-*", "r-*")


def run_folder(run: str) -> Path:
    """Folder of a run in shared memory."""
    return SHARED_MEMORY / f"async-grpo-{run}"


def store_path(run: str, name: str) -> Path:
    """Path of a run's store `name`."""
    return run_folder(run) / f"{name}.weights"


def remove_stores(run: str) -> None:
    """Remove all shared-memory files of `run`. Processes that still map a store keep its pages."""
    shutil.rmtree(run_folder(run), ignore_errors=True)


def remove_trainer_files(run: str) -> None:
    """Remove the store and sockets of a trainer that has ended. A receiver's files in the same folder remain."""
    folder = run_folder(run)
    if not is_own_folder(folder):  # another user's symbolic link could point at files that we must not remove
        return
    for pattern in _TRAINER_FILES:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    remove_empty_run_folder(folder)


def remove_empty_run_folder(folder: Path) -> None:
    """Remove a run's folder in shared memory if it is empty."""
    if folder.parent == SHARED_MEMORY:
        with suppress(OSError):  # not empty, or already removed
            folder.rmdir()


def round_up_to_pages(count: int) -> int:
    """Round `count` bytes up to a multiple of the page size."""
    return -(-count // PAGE) * PAGE


def allocate_file(path: Path, size: int) -> tuple[int, mmap.mmap]:
    """Create a file of `size` bytes and map it. Returns its descriptor and its memory.

    Raises WeightsError if there is no room, and ConfigError if the folder is not private.
    """
    make_private_folder(path.parent)
    path.unlink(missing_ok=True)
    check_free_space(path, size)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # Allocate all pages now: a first access is slow, and without room it would kill the process with SIGBUS.
        os.posix_fallocate(descriptor, 0, size)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        return descriptor, mmap.mmap(descriptor, size, flags=flags)
    except BaseException as error:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            check_free_space(path, size)
        raise


def check_free_space(path: Path, size: int) -> None:
    """Raise WeightsError if the file system or the machine's memory has no room for `size` more bytes."""
    free = shutil.disk_usage(path.parent).free
    if free < size:
        raise WeightsError(
            f"a weight store of {size} bytes (one copy of the model per slot) does not fit into {path.parent}: "
            f"{free} bytes are free, {size - free} too few. Remove files there or enlarge it "
            "(mount -o remount,size=..., docker run --shm-size=...)."
        )
    available = _available_bytes()
    if available is not None and available < size:
        raise WeightsError(
            f"a weight store of {size} bytes (one copy of the model per slot) does not fit into memory: "
            f"{available} bytes are available, {size - available} too few. Free memory or use a machine with more: "
            f"pages in {path.parent} cannot be reclaimed while they are in use."
        )


def _available_bytes() -> int | None:
    with suppress(OSError):
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
