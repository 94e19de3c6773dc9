"""Files and folders that are whole or not there, data that survives a loss of power, and locks between processes.

A writer works on a draft beside the place; the draft gets the name when all of it has been written, so that a reader
never sees half of it. Locks are the kernel's (flock): they end with the process that holds them, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

from async_grpo.errors import DataError


@contextlib.contextmanager
def atomic_file(path: Path, *, synced: bool = False) -> Iterator[BinaryIO]:
    """A draft to write to; when the block has succeeded it replaces `path`, else it is removed.

    Several processes may write the same path at the same time, on whatever machine: each has its own draft. `synced`:
    the file and its name are on disk when this returns.
    """
    draft = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        with draft.open("xb") as file:
            yield file
        if synced:
            sync(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    if synced:
        sync(path.parent)


def write_atomic(path: Path, content: str | bytes, *, synced: bool = False) -> Path:
    """Write the file whole or not at all (text as UTF-8) and return its path; see `atomic_file`."""
    with atomic_file(path, synced=synced) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


def sync(path: Path) -> None:
    """Return when the content of the file, or the names in the folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def try_lock(file: int | IO[str]) -> bool:
    """Lock an open file for its holder alone, without waiting; False if it is locked already."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def locked(path: Path, busy: Exception) -> Iterator[None]:
    """Hold the lock file `path` for the length of the block. Raises `busy` if another process holds it."""
    with path.open("w") as lock:
        if not try_lock(lock):
            raise busy
        yield


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """An empty draft folder; when the block has succeeded it becomes `folder`, and is on disk if its files are.

    A draft that a killed process left behind is removed; the lock on the draft tells it from one in use. Raises
    DataError if `folder` exists, or while another process makes it.
    """
    _check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.draft")
    lock = _lock_draft(draft, folder)
    try:
        for path in draft.iterdir():
            path.unlink()
        yield draft
        os.fsync(lock)
        _check_free(folder)
        draft.rename(folder)
        sync(folder.parent)
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


def _lock_draft(draft: Path, folder: Path) -> int:
    """A descriptor that holds the lock. Another process may rename or remove the draft at any moment before."""
    while True:
        draft.mkdir(exist_ok=True)
        try:
            lock = os.open(draft, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        if not try_lock(lock):
            os.close(lock)
            raise DataError(f"another process is preparing {folder}. Wait for it, or choose another --out")
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(lock).st_ino == draft.stat().st_ino:
                return lock
        os.close(lock)
