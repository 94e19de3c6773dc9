"""Process trees: ending everything that a dead role has left, and engines that end with their rollout server.

Every role is started in a process group of its own, with a mark in its environment. Its children inherit both, unless
they leave the group or write their title over their environment (vLLM's engine does). The supervisor adopts orphans, so
it finds and ends whatever a killed role had started (`end_family`).

vLLM's engine process does not notice that the rollout server was killed; its workers do it here (`exit_with_owner`):

    rollout server (owner) --> EngineCore --> worker      or, merged:      owner --> EngineCore with worker
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from pathlib import Path

import psutil

from async_grpo.utils.child_process import MARK_VARIABLE

OWNER = "ASYNC_GRPO_ENGINE_OWNER"
"""Environment variable inherited by vLLM's processes: the machine and the process id of the rollout server."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")
_GRACE_S = 5.0


def mark(run: str, role: str = "") -> str:
    """What identifies the processes of one role of one supervisor; without a role, what its roles share."""
    return f"{os.getpid()}/{run}/{role}"


def end_family(value: str, group: int | None = None) -> int:
    """SIGKILL every descendant that carries the mark, or is in the group, and reap it; returns how many there were.

    Python's resource trackers among them end by themselves after the last of the others, and remove what those have
    left in shared memory; they are killed only if they do not.
    """
    left = [process for process in psutil.Process().children(recursive=True) if _belongs(process, value, group)]
    trackers = [process for process in left if _is_tracker(process)]
    killed = [process for process in left if process not in trackers]
    _kill(killed)
    _kill(psutil.wait_procs(trackers, timeout=_GRACE_S)[1])
    for process in left:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
    return len(left)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_GRACE_S)


def _is_tracker(process: psutil.Process) -> bool:
    """Of `multiprocessing`: it knows the semaphores and shared memory of all processes that one role has spawned."""
    try:
        return any("multiprocessing.resource_tracker" in argument for argument in process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _belongs(process: psutil.Process, value: str, group: int | None) -> bool:
    try:
        return os.getpgid(process.pid) == group or process.environ().get(MARK_VARIABLE) == value
    except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
        return False


def become_owner() -> None:
    """Name this process as the owner of engines to come; the rollout server calls it before it starts vLLM."""
    os.environ[OWNER] = f"{_here()} {os.getpid()}"


def exit_with_owner() -> None:
    """Called in a worker: end the engine when the rollout server ends, however it ends; at once if it has ended.

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
