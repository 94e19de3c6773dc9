"""Files and folders written atomically, data synced to disk, and locks between processes.

A writer writes a draft beside the target and renames it when it is complete, so that a reader never sees half a file.
Locks are the kernel's (flock): they end with the process that holds them, however it ends.

`DeviceTurn` is about devices on which the trainer makes steps while the engines of the machine sleep:

    trainer    locks `wish`  -->  waits for the lock of `use`  -->  makes a step  -->  unlocks both
    server     shares the lock of `use` while its engine has memory on the devices
               sees that `wish` is locked  -->  its engine sleeps  -->  unlocks `use`
               sees that `wish` is free    -->  locks `use`        -->  its engine wakes

A step waits for the slowest server (with a timeout), a server for the step. No engine sleeps for good: the locks of a
trainer that dies fall free. A server that dies, or that starts in the middle of a step, does not disturb the step.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

from async_grpo.errors import ConfigError, DataError, WaitTimeout

LOOK_EVERY_S = 0.02
"""Seconds between two looks at a lock: the kernel tells nobody when it falls free."""

LOOK_TAKES_S = 0.2
"""A lock that stays held for this many seconds belongs to a process at work, not to one that only tests it."""


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


def read_end(path: Path, most: int, *, start: int = 0) -> bytes:
    """The last `most` bytes of a file, or less if it has less behind `start`. Raises OSError."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - most))
        return file.read()


def sync(path: Path) -> None:
    """Write the content of the file, or the names in the folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_private_folder(folder: Path) -> None:
    """Create the folder with mode 700, or use one that only this user can use.

    For folders with a predictable path in a place where every user may write (/dev/shm, /tmp): somebody else may have
    made it first. Raises ConfigError for a folder of another user, one that others may use, and a link.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        problem = "is a link or a file, not a folder"
    elif found.st_uid != os.geteuid():
        problem = f"belongs to user {found.st_uid}, but this process runs as user {os.geteuid()}"
    elif found.st_mode & 0o077:
        problem = f"has mode {stat.S_IMODE(found.st_mode):o}, but group and others must have no rights (700)"
    else:
        return
    raise ConfigError(
        f"{folder} {problem}: other users could replace what this run reads there. If no run uses it, remove it "
        f"(rm -r {folder}, as its owner or root); otherwise give this run another name (-o name=...)"
    )


def is_own_folder(folder: Path) -> bool:
    """True for a folder of this user; False for a link, a folder of another user, and if there is none."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def try_lock(file: int | IO[str], *, shared: bool = False) -> bool:
    """Lock an open file, exclusively or together with others, without waiting; False if that is not possible now."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def locked(path: Path, busy: Exception) -> Iterator[None]:
    """Hold the lock file `path` for the length of the block. Raises `busy` if another process holds it."""
    with path.open("w") as lock:
        until_s = time.monotonic() + LOOK_TAKES_S
        while not try_lock(lock):
            if time.monotonic() > until_s:
                raise busy
            time.sleep(LOOK_EVERY_S)
        yield


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock file. The test itself shares the lock for a moment, which `locked` waits for."""
    try:
        with path.open() as lock:
            return not try_lock(lock, shared=True)
    except FileNotFoundError:
        return False


class DeviceTurn:
    """Whose turn it is on the devices that the trainer and the servers of a machine share; one object a process."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of the run, which all of them see."""
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT
        self._wish, self._use = (os.open(folder / f".device-{name}", flags, 0o600) for name in ("wish", "use"))

    def begin_step(self, timeout_s: float) -> None:
        """Wait until all engines sleep. Raises WaitTimeout, and they may wake again."""
        deadline_s = time.monotonic() + timeout_s
        for lock in (self._wish, self._use):
            while not try_lock(lock):
                if time.monotonic() > deadline_s:
                    self.end_step()
                    raise WaitTimeout(
                        "the engines on the trainer's devices to sleep (launch.share_devices)",
                        timeout_s,
                        "The logs of the rollout servers say what they wait for",
                    )
                time.sleep(LOOK_EVERY_S)

    def end_step(self) -> None:
        """Let the engines wake."""
        for lock in (self._use, self._wish):
            fcntl.flock(lock, fcntl.LOCK_UN)

    async def use(self) -> None:
        """Wait until no step is made or wanted; after that none begins before `yield_to_step`. No timeout: a long step
        is no fault, and that of a trainer that dies ends."""
        while self._is_wanted() or not try_lock(self._use, shared=True):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_EVERY_S)

    async def wanted(self) -> None:
        """Wait until the trainer wants to make a step. No timeout: it may wait long for its batch."""
        while not self._is_wanted():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_EVERY_S)

    def yield_to_step(self) -> None:
        """Say that the engine of this process sleeps."""
        fcntl.flock(self._use, fcntl.LOCK_UN)

    def close(self) -> None:
        """Give up all locks."""
        os.close(self._use)
        os.close(self._wish)

    def _is_wanted(self) -> bool:
        if not try_lock(self._wish, shared=True):
            return True
        fcntl.flock(self._wish, fcntl.LOCK_UN)
        return False


@contextlib.contextmanager
def whole_folder(folder: Path, *, shared: bool = False) -> Iterator[Path]:
    """Create an empty draft folder, which replaces `folder` when the block succeeds, and is removed when it fails.

    With `shared`, several processes may make the same folder at the same time: each has its own draft, and the first
    result stays, because others may be reading it already. Otherwise the draft of a process that was killed is emptied.
    """
    draft = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}" if shared else f"{folder.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        if not shared:
            shutil.rmtree(folder, ignore_errors=True)
        try:
            draft.rename(folder)
        except OSError as error:
            if not shared or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


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
