"""How one sample comes about."""

from __future__ import annotations

from typing import Protocol

from async_grpo.wire import Sample, Task
from rollout_server.session import Session


class Workflow(Protocol):
    """Turns a task into a sample with the help of the engine. Runs many times concurrently."""

    async def run(self, task: Task, session: Session) -> Sample:
        """One sample without rewards. Raises EngineError if the engine died; any other exception
        makes the group `failed`."""
        ...
