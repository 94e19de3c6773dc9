"""vLLM's engine process does not notice that the rollout server was killed; its workers do it here.

rollout server (owner) --> EngineCore --> worker      or, merged:      owner --> EngineCore with worker
"""

from __future__ import annotations

import os
import select
import signal
import threading

import psutil

OWNER = "ASYNC_GRPO_ENGINE_OWNER"
"""Environment variable with the process id of the rollout server, inherited by vLLM's processes."""


def claim_ownership() -> None:
    """Called in the rollout server before it starts vLLM."""
    os.environ[OWNER] = str(os.getpid())


def end_with_owner() -> None:
    """Called in a worker: when the rollout server ends, however it ends, so does the engine.

    Does nothing in a process that is neither child nor grandchild of it (a worker on another machine).
    """
    owner = int(os.environ.get(OWNER, "0"))
    ancestors = [process.pid for process in psutil.Process().parents()[:2]]
    if owner not in ancestors or not hasattr(os, "pidfd_open"):
        return
    engine = [os.getpid(), *ancestors][ancestors.index(owner)]
    handle = os.pidfd_open(owner)
    threading.Thread(target=_kill_when_ended, args=(handle, engine), daemon=True, name="owner-watch").start()


def _kill_when_ended(handle: int, engine: int) -> None:
    select.select([handle], [], [])  # readable once the owner has ended
    for process in (engine, os.getpid()):
        os.kill(process, signal.SIGKILL)
