"""A folder that is made beside its place and gets its name when all of it is on the disk.

    .NAME.draft  --everything written and synced-->  rename  -->  NAME

However the maker ends, NAME is whole or not there. What a maker that was killed left behind is removed by the next
one; the kernel's lock on the draft (it ends with its holder) tells which of them is alive.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from async_grpo.errors import DataError


@contextlib.contextmanager
def draft_of(folder: Path) -> Iterator[Path]:
    """An empty draft folder; when the block has succeeded it becomes `folder`.

    Raises DataError if `folder` exists, or while another process makes it.
    """
    _check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.draft")
    lock = _claim(draft, folder)
    try:
        _empty(draft)
        yield draft
        os.fsync(lock)
        _check_free(folder)
        draft.rename(folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _check_free(folder: Path) -> None:
    if folder.exists():
        raise DataError(
            f"{folder} exists, and a run may be reading it: nothing is ever prepared over something else. "
            "Choose another --out, or remove it first"
        )


def _claim(draft: Path, folder: Path) -> int:
    """A descriptor that holds the draft folder; whoever made it before may just have renamed or removed it."""
    while True:
        draft.mkdir(exist_ok=True)
        try:
            lock = os.open(draft, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise DataError(f"another process is preparing {folder}. Wait for it, or choose another --out") from None
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(lock).st_ino == draft.stat().st_ino:
                return lock
        os.close(lock)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def _sync(folder: Path) -> None:
    """So that the name outlives a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
