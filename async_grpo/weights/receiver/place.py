"""Where the receiver of a machine lies, and how the first server starts it.

    NAME.weights   the store       NAME.sock   the Unix socket       NAME.lock   held while the process lives

Whoever gets the lock starts the process and hands the locked file over to it: the lock belongs to the
open file, so it is held from before the process exists until it ends, however it ends. There is never
a second one, and never a moment in which two servers start one each.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from async_grpo.config.weights import WeightsConfig
from async_grpo.process import MARK_VARIABLE, run_mark

_KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
"""For glibc: else the memory of every received chunk goes back to the kernel, and comes again as pages that have to be
cleared, which takes a quarter of the time of a transfer."""


@dataclass(frozen=True, slots=True)
class Place:
    """`store` is the path of the weight store; everything else lies beside it."""

    store: Path

    @property
    def socket(self) -> Path:
        """The Unix socket."""
        return self.store.with_suffix(".sock")

    @property
    def lock(self) -> Path:
        """The lock file."""
        return self.store.with_suffix(".lock")


def start_receiver(place: Place, config: WeightsConfig) -> subprocess.Popen[bytes] | None:
    """Start the receiver process; None if one lives already.

    It is in a session of its own and carries the mark of the run, not that of the role that started it: it must
    outlive this server as long as there are others. It ends by itself when there are none.
    """
    place.store.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(place.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        marked = {MARK_VARIABLE: run_mark(os.environ.get(MARK_VARIABLE, ""))}
        arguments = ["--store", str(place.store), "--config", config.model_dump_json()]
        return subprocess.Popen(
            [sys.executable, "-m", "async_grpo.weights.receiver.process", *arguments],
            stdin=subprocess.DEVNULL,
            env=_KEPT_MEMORY | os.environ | marked,
            pass_fds=[lock],
            start_new_session=True,
        )
    finally:
        os.close(lock)
