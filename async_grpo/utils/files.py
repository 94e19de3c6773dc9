"""Files and folders written atomically, data synced to disk, and locks between processes.

A writer writes a draft next to the target and renames it when it is complete, so that a reader never sees a part of a
file. Locks are the kernel's (flock): the kernel releases them when the process that has them ends.

`DeviceTurn` coordinates the use of devices on which the trainer makes steps while the engines of the machine sleep:

    trainer    locks `wish`  -->  waits for the lock of `use`  -->  makes a step  -->  unlocks both
    server     shares the lock of `use` while its engine has memory on the devices
               sees that `wish` is locked  -->  its engine sleeps  -->  unlocks `use`
               sees that `wish` is free    -->  locks `use`        -->  its engine wakes

A step waits for the slowest server (with a timeout), a server for the step. No engine sleeps for ever: the locks of a
trainer that dies are released. A server that dies, or that starts in the middle of a step, does not disturb the step.
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

POLL_LOCK_S = 0.02
"""Interval of polling a lock: the kernel does not notify anyone when a lock is released."""

MAX_TEST_S = 0.2
"""Maximum seconds for which `is_locked` can have a lock. After that, the lock belongs to a process at work."""


@contextlib.contextmanager
def atomic_file(path: Path, *, synced: bool = False) -> Iterator[BinaryIO]:
    """Open a draft for writing. It replaces `path` when the block succeeds, and is removed otherwise.

    Several processes, also on different machines, may write the same path at the same time: each has its own draft.
    With `synced`, the file and its name are on disk when this returns.
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
    """Write the file atomically (text as UTF-8) and return its path."""
    with atomic_file(path, synced=synced) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


def read_end(path: Path, max_bytes: int, *, start: int = 0) -> bytes:
    """Return the last `max_bytes` bytes of a file, or fewer if it has fewer after `start`. Raises OSError."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - max_bytes))
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

    Use it for a predictable path in a folder where all users may write (/dev/shm, /tmp): another user may have created
    it first. Raises ConfigError for a folder of another user, a folder that others may use, and a link.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        problem = "is a link or a file, not a folder"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to user {status.st_uid}, but this process runs as user {os.geteuid()}"
    elif status.st_mode & 0o077:
        problem = f"has mode {stat.S_IMODE(status.st_mode):o}, but group and others must have no rights (700)"
    else:
        return
    raise ConfigError(
        f"{folder} {problem}: other users could replace what this run reads there. If no run uses it, remove it "
        f"(rm -r {folder}, as its owner or root); otherwise give this run another name (-o name=...)"
    )


def is_own_folder(folder: Path) -> bool:
    """True for a folder of this user; False for a link, a folder of another user, and a missing one."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def try_lock(file: int | IO[str], *, shared: bool = False) -> bool:
    """Lock an open file without waiting, exclusively or shared. False if that is not possible now."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def locked(path: Path, busy: Exception) -> Iterator[None]:
    """Lock the file `path` for the duration of the block. Raises `busy` if another process has the lock."""
    with path.open("w") as lock:
        until_s = time.monotonic() + MAX_TEST_S
        while not try_lock(lock):
            if time.monotonic() > until_s:
                raise busy
            time.sleep(POLL_LOCK_S)
        yield


def is_locked(path: Path) -> bool:
    """True if a process has locked the file. The test itself takes a shared lock briefly, for which `locked` waits."""
    try:
        with path.open() as lock:
            return not try_lock(lock, shared=True)
    except FileNotFoundError:
        return False


class DeviceTurn:
    """The turn on devices that the trainer and the servers of a machine share. One object per process."""

    def __init__(self, folder: Path) -> None:
        """`folder`: a folder of the run that all processes share."""
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT
        self._wish = os.open(folder / ".device-wish", flags, 0o600)
        self._use = os.open(folder / ".device-use", flags, 0o600)

    def begin_step(self, timeout_s: float) -> None:
        """Wait until all engines sleep. After a WaitTimeout they may wake again."""
        deadline_s = time.monotonic() + timeout_s
        for lock in (self._wish, self._use):
            while not try_lock(lock):
                if time.monotonic() > deadline_s:
                    self.end_step()
                    raise WaitTimeout(
                        "the engines on the trainer's devices to sleep (launch.share_devices)",
                        timeout_s,
                        "The logs of the rollout servers have what they wait for",
                    )
                time.sleep(POLL_LOCK_S)

    def end_step(self) -> None:
        """Let the engines wake."""
        for lock in (self._use, self._wish):
            fcntl.flock(lock, fcntl.LOCK_UN)

    async def use(self) -> None:
        """Wait until no step is made or wanted; after that none starts before `yield_to_step`.

        No timeout: a long step is no fault, and that of a trainer that dies ends.
        """
        while self._is_wanted() or not try_lock(self._use, shared=True):  # noqa: ASYNC110
            await asyncio.sleep(POLL_LOCK_S)

    async def wanted(self) -> None:
        """Wait until the trainer wants to make a step. No timeout: it may wait long for its batch."""
        while not self._is_wanted():  # noqa: ASYNC110
            await asyncio.sleep(POLL_LOCK_S)

    def yield_to_step(self) -> None:
        """Announce that the engine of this process sleeps."""
        fcntl.flock(self._use, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release all locks."""
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
