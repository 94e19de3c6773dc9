"""vLLM's engine process does not notice that the rollout server was killed; its workers do it here.

rollout server (owner) --> EngineCore --> worker      or, merged:      owner --> EngineCore with worker
"""

from __future__ import annotations

import os
import select
import signal
import threading
from pathlib import Path

import psutil

OWNER = "ASYNC_GRPO_ENGINE_OWNER"
"""Environment variable inherited by vLLM's processes: the machine and the process id of the rollout server."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")


def claim_ownership() -> None:
    """Called in the rollout server before it starts vLLM."""
    os.environ[OWNER] = f"{_here()} {os.getpid()}"


def end_with_owner() -> None:
    """Called in a worker: when the rollout server ends, however it ends, so does the engine; at once if it has ended
    already, while the engine was starting.

    Does nothing in a worker on another machine or in another container.
    """
    machine, _, number = os.environ.get(OWNER, "").rpartition(" ")
    if not machine or machine != _here() or not hasattr(os, "pidfd_open"):
        return
    owner = int(number)
    ancestors = [process.pid for process in psutil.Process().parents()[:2]]
    if not psutil.pid_exists(owner):
        _end_orphans(ancestors)
    if owner not in ancestors:
        return  # started by somebody else's executor, who looks after it
    engine = [os.getpid(), *ancestors][ancestors.index(owner)]
    handle = os.pidfd_open(owner)
    threading.Thread(target=_kill_when_ended, args=(handle, engine), daemon=True, name="owner-watch").start()


def _end_orphans(ancestors: list[int]) -> None:
    """The owner died while the engine was starting: whatever of the engine is above this process goes with it."""
    parent = ancestors[0] if ancestors else 1
    if parent != 1 and OWNER in _environment(parent):
        os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _environment(process: int) -> dict[str, str]:
    try:
        return psutil.Process(process).environ()
    except psutil.Error:
        return {}


def _here() -> str:
    """Names this machine, as long as it is up, and this container."""
    try:
        return f"{BOOT_ID.read_text().strip()}/{PID_NAMESPACE.readlink()}"
    except OSError:
        return ""


def _kill_when_ended(handle: int, engine: int) -> None:
    select.select([handle], [], [])  # readable once the owner has ended
    for process in (engine, os.getpid()):
        os.kill(process, signal.SIGKILL)
