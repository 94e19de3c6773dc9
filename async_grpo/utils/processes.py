"""Process trees: killing the children of a dead role, and engines that end with their rollout server.

Every role is started in a separate process group, with a mark in its environment. Its children inherit both, unless
they leave the group or overwrite their environment with their title (as vLLM's engine does). The supervisor adopts
orphans, so it finds and kills all processes that a killed role had started (`end_family`).

vLLM's engine process does not notice that the rollout server was killed. Its workers do, with `exit_with_owner`:

    rollout server (owner) --> EngineCore --> worker      or, merged:      owner --> EngineCore with worker
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from async_grpo.utils.child_process import MARK_VARIABLE

OWNER = "ASYNC_GRPO_ENGINE_OWNER"
"""Environment variable that vLLM's processes inherit: the machine and the process id of the rollout server."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")
_GRACE_S = 5.0


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection while large packages are imported, which saves a third of the time.

    Objects that exist at the end are exempt from later collections, so forked processes share their memory.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def mark(run: str, role: str = "") -> str:
    """Return the mark of one role of this supervisor; without a role, of processes that all its roles share."""
    return f"{os.getpid()}/{run}/{role}"


def end_family(value: str, group: int | None = None) -> int:
    """Kill and reap all descendants that have the mark or are in the group. Returns their number."""
    family = [process for process in psutil.Process().children(recursive=True) if _belongs(process, value, group)]

    # Python's resource trackers end by themselves after all others, and remove what those left in shared memory. So
    # kill them last, and only if they do not end.
    trackers = [process for process in family if _is_tracker(process)]
    others = [process for process in family if process not in trackers]
    _kill(others)
    _, running_trackers = psutil.wait_procs(trackers, timeout=_GRACE_S)
    _kill(running_trackers)

    for process in family:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
    return len(family)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_GRACE_S)


def _is_tracker(process: psutil.Process) -> bool:
    """True for the resource tracker of `multiprocessing`, which frees semaphores and shared memory of a role."""
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
    """Make this process the owner of the engines that it starts; the rollout server calls it before it starts vLLM."""
    os.environ[OWNER] = f"{_machine_id()} {os.getpid()}"


def exit_with_owner() -> None:
    """Kill the engine when the rollout server ends, immediately if it has already ended.

    Called in a worker. Does nothing in a worker on another machine or in another container.
    """
    machine, _, number = os.environ.get(OWNER, "").rpartition(" ")
    if not machine or machine != _machine_id() or not hasattr(os, "pidfd_open"):
        return
    owner = int(number)
    ancestors = [process.pid for process in psutil.Process().parents()[:2]]
    if not psutil.pid_exists(owner):
        _end_orphans(ancestors)
    if owner not in ancestors:
        return  # another executor started this worker, and ends it
    engine = [os.getpid(), *ancestors][ancestors.index(owner)]
    handle = os.pidfd_open(owner)
    threading.Thread(target=_kill_when_ended, args=(handle, engine), daemon=True, name="owner-watch").start()


def _end_orphans(ancestors: list[int]) -> None:
    """The owner died while the engine was starting: end this process and the engine process above it."""
    parent = ancestors[0] if ancestors else 1
    if parent != 1 and OWNER in _environment(parent):
        os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _environment(process: int) -> dict[str, str]:
    try:
        return psutil.Process(process).environ()
    except psutil.Error:
        return {}


def _machine_id() -> str:
    """Return an identifier of this machine (until it reboots) and this container; "" if it is unknown."""
    try:
        return f"{BOOT_ID.read_text().strip()}/{PID_NAMESPACE.readlink()}"
    except OSError:
        return ""


def _kill_when_ended(handle: int, engine: int) -> None:
    select.select([handle], [], [])  # readable once the owner has ended
    for process in (engine, os.getpid()):
        os.kill(process, signal.SIGKILL)
