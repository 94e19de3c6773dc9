"""Files in shared memory: their paths, who may use them, and whether there is room for them.

    /dev/shm/async-grpo-RUN/
        trainer.weights  ctl-PID  r-TOKEN             the trainer's store, the sockets of its processes
        node.weights  node.sock  node.lock            the receiver of the machine's rollout servers

The folder's name can be guessed, and every user may create files in /dev/shm. So a folder that another user made or
may use is refused (`make_private_folder`): that user could choose the weights that the engines load.
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
    """The folder of a run in shared memory."""
    return SHARED_MEMORY / f"async-grpo-{run}"


def store_path(run: str, name: str) -> Path:
    """The path of the store `name` of a run."""
    return run_folder(run) / f"{name}.weights"


def remove_stores(run: str) -> None:
    """Remove the stores of `run` that are left; processes that still map them keep their pages."""
    shutil.rmtree(run_folder(run), ignore_errors=True)


def remove_trainer_files(run: str) -> None:
    """Remove the store and the sockets of the trainer of `run`, which has ended, and keep those of a receiver."""
    folder = run_folder(run)
    if not is_own_folder(folder):  # a link of another user could lead to files that are not ours to remove
        return
    for pattern in _TRAINER_FILES:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    remove_empty_run_folder(folder)


def remove_empty_run_folder(folder: Path) -> None:
    """Remove the folder of a run in shared memory, unless something is still in it."""
    if folder.parent == SHARED_MEMORY:
        with suppress(OSError):  # other files of the run are in it, or it is gone
            folder.rmdir()


def round_up_to_pages(count: int) -> int:
    """`count` rounded up to whole pages."""
    return -(-count // PAGE) * PAGE


def allocate_file(path: Path, size: int) -> tuple[int, mmap.mmap]:
    """Create a file of `size` bytes; returns its descriptor and its memory. All pages are allocated here, because the
    first access to a page is slow. Raises WeightsError, with the sizes, if there is no room, and ConfigError as
    `make_private_folder`."""
    make_private_folder(path.parent)
    path.unlink(missing_ok=True)
    check_free_space(path, size)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
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
