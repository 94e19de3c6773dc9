"""RayRole: what an actor of Ray does on its node: it runs one role as a process, and stops it.

The actor is no part of the role. The process is a child of it, and dies with it: then Ray has lost the actor, and the
launcher starts the role elsewhere.
"""

from __future__ import annotations

import asyncio
import threading

from async_grpo.app.launch.role_process import RoleProcess, RoleSpec


class RayRole:
    """One start of one role. `run` lasts as long as the role, and `stop` is called from another thread."""

    def __init__(self) -> None:
        self.process: RoleProcess | None = None
        self.stopping = threading.Event()
        self._ended = threading.Event()

    def run(self, spec: RoleSpec, run: str) -> tuple[int, str]:
        """Run the role to its end; returns its exit code (-N: signal N), and words that say how it ended."""
        try:
            return asyncio.run(_run(self, spec, run))
        finally:
            self._ended.set()

    def stop(self, timeout_s: float) -> None:
        """Send SIGTERM, wait, and send SIGKILL after `timeout_s`. A role that has not begun ends as soon as it does."""
        self.stopping.set()
        if self.process is not None:
            self.process.terminate()
        if not self._ended.wait(timeout_s) and self.process is not None:
            self.process.kill()


async def _run(role: RayRole, spec: RoleSpec, run: str) -> tuple[int, str]:
    """What `RayRole.run` does. Outside: Ray calls every method of a class with coroutines in its own loop."""
    role.process = process = await RoleProcess.start(spec, run)
    if role.stopping.is_set():
        process.terminate()
    code = await process.wait()
    return code, process.explain(code)
