"""RayRole: the Ray actor that runs one role as a process on its node, and stops it.

The process is a child of the actor and dies with it. Ray then reports the actor as lost, and the launcher starts the
role elsewhere.
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
        """Run the role to its end. Returns its exit code (-N after signal N) and an explanation."""
        try:
            return asyncio.run(_run(self, spec, run))
        finally:
            self._ended.set()

    def stop(self, timeout_s: float) -> None:
        """Send SIGTERM, and SIGKILL after `timeout_s`. A role that has not started yet is stopped when it starts."""
        self.stopping.set()
        if self.process is not None:
            self.process.terminate()
        if not self._ended.wait(timeout_s) and self.process is not None:
            self.process.kill()


async def _run(role: RayRole, spec: RoleSpec, run: str) -> tuple[int, str]:
    """Run the role to its end. Not a method, because Ray runs all methods of a class with coroutines in one event
    loop, where `stop` could not run in another thread."""
    role.process = process = await RoleProcess.start(spec, run)
    if role.stopping.is_set():
        process.terminate()
    code = await process.wait()
    return code, process.explain(code)
