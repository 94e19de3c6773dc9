"""Files and folders written atomically, data synced to disk, and locks between processes.

A writer writes a draft beside the target and renames it when it is complete, so that a reader never sees half a file.
Locks are the kernel's (flock): they end with the process that holds them, however it ends.
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
    """Open a draft for writing. It replaces `path` when the block succeeds, and is removed otherwise.

    Several processes, also on different machines, may write the same path at the same time: each has its own draft.
    With `synced` the file and its name are on disk when this returns.
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
    """Write the file atomically (text as UTF-8) and return its path; see `atomic_file`."""
    with atomic_file(path, synced=synced) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


def sync(path: Path) -> None:
    """Write the content of the file, or the names in the folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def try_lock(file: int | IO[str]) -> bool:
    """Lock an open file exclusively, without waiting; False if it is locked already."""
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
    """Create an empty draft folder, which becomes `folder` when the block succeeds. Its names are then on disk; syncing
    the files is up to the block.

    A draft that a killed process left is emptied; the lock tells it from a draft in use. Raises DataError if `folder`
    exists, or if another process is making it.
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
    """A descriptor that holds the draft's lock. Until it is locked, another process may rename or remove the draft."""
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
