"""The processes of one `async-grpo run`, and what they touch: found by role, and by what is left of them.

This process adopts the orphans of the run, so that every process of it stays below this one, whatever dies in
between; processes of others are never looked at.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from async_grpo.process import adopt_orphans

SHARED_MEMORY = Path("/dev/shm")
_ROLES = {
    "command": r"-m async_grpo\.cli\.main run",
    "server": r"-m rollout_server\.main",
    "engine": r"VLLM::EngineCore",
    "receiver": r"-m async_grpo\.weights\.receiver\.process",
    "publisher": r"-m async_grpo\.weights\.publisher\.process",
    "launcher": r"-m (torch\.distributed\.run|trainer\.nodes\.main)",
    "rank": r"-m trainer\.main",
    "redis": r"(valkey|redis)-server",
    "reward": r"-m async_grpo\.rewards\.(warden|supervisor)",
}
"""Pattern of the command line; the first that fits. Reward supervisors are told from their workers by who started
them: a worker's parent is one of them."""
KINDS = (*(role for role in _ROLES if role != "reward"), "reward supervisor", "reward worker")


class RunFamily:
    """Everything that this process started, and whatever those started."""

    def __init__(self) -> None:
        adopt_orphans()
        self._shared_before = _shared_memory()
        self.shared: set[int] = set()
        """Inodes of the files in shared memory that a process of the run has mapped."""
        self.listened: set[tuple[str, int]] = set()
        """Addresses on which a process of the run has listened."""

    def alive(self) -> list[psutil.Process]:
        """All that have not ended; those that have and belong to nobody are reaped."""
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def reap(self, spare: int) -> None:
        """Take note of the end of adopted children; `spare` is somebody else's to wait for."""
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
                if process.pid != spare and process.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(process.pid, os.WNOHANG)

    def of_kind(self, kind: str) -> list[psutil.Process]:
        """The processes of that kind that run now, in the order of their start."""
        return [process for process in self.alive() if role_of(process) == kind]

    def look(self) -> None:
        """Note what they have mapped in shared memory, and where they listen."""
        for process in self.alive():
            with contextlib.suppress(psutil.Error, OSError):
                self.shared |= _mapped(process.pid)
                self.listened |= _listening(process.net_connections("tcp"))

    def wait_until_gone(self, spare: int, timeout_s: float) -> list[psutil.Process]:
        """Those that still run after so long."""
        until_s = time.monotonic() + timeout_s
        while (left := self.alive()) and time.monotonic() < until_s:
            self.reap(spare)
            time.sleep(0.1)
        self.reap(spare)
        return left

    def end(self, processes: Iterable[psutil.Process]) -> None:
        """SIGKILL."""
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)

    def left_in_shared_memory(self, run: str) -> list[str]:
        """Files that were not there before and that the run had mapped, or that bear its name."""
        left = []
        for path in _shared_memory() - self._shared_before:
            with contextlib.suppress(FileNotFoundError):  # somebody else's, gone meanwhile
                if path.stat().st_ino in self.shared or path.name.startswith(f"async-grpo-{run}-"):
                    left.append(path.name)
        return sorted(left)

    def still_listening(self) -> list[tuple[str, int]]:
        """Addresses of the run on which somebody still listens."""
        return sorted(self.listened & _listening(psutil.net_connections("tcp")))


def role_of(process: psutil.Process) -> str:
    """One of KINDS; "" for a process of no such kind, and for one that has gone."""
    try:
        line = f"{process.name()} {' '.join(process.cmdline())}"
        role = next((role for role, pattern in _ROLES.items() if re.search(pattern, line)), "")
        if role != "reward":
            return role
        parent = process.parent()
        below = parent is not None and re.search(_ROLES["reward"], " ".join(parent.cmdline()))
        return "reward worker" if below else "reward supervisor"
    except psutil.Error:
        return ""


def describe(process: psutil.Process) -> str:
    """Number, state and command of a process, for a reader."""
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())[:120]}"
    except psutil.Error:
        return f"{process.pid} has gone"


def _listening(connections: Iterable[Any]) -> set[tuple[str, int]]:
    return {(each.laddr.ip, each.laddr.port) for each in connections if each.status == psutil.CONN_LISTEN}


def _mapped(pid: int) -> set[int]:
    """Inodes of the files in shared memory that a process has mapped. Their names say less: a semaphore is made under
    another name, linked to its own, and mapped under the first."""
    lines = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {int(fields[4]) for fields in lines if len(fields) == 6 and fields[5].startswith(f"{SHARED_MEMORY}/")}


def _shared_memory() -> set[Path]:
    return set(SHARED_MEMORY.iterdir())
