"""Whether the dispatcher may take up more groups.

    open <--pause, resume--> paused
      \\                      /
       +------> draining <---+        for good: the server leaves the run when nothing is in flight any more

The dispatcher waits here while it is paused; `resume` and `drain` unblock it.
"""

from __future__ import annotations

import asyncio
from enum import Enum

import structlog

log = structlog.get_logger()


class State(Enum):
    """Of the admission of groups."""

    OPEN = "open"
    PAUSED = "paused"
    DRAINING = "draining"


class Admission:
    """A switch that somebody else may turn."""

    def __init__(self) -> None:
        self.state = State.OPEN
        self.hurry = asyncio.Event()
        """Do not wait for what is in flight: store it and give it back."""
        self._turned = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether a new group may be taken up."""
        return self.state is State.OPEN

    @property
    def is_draining(self) -> bool:
        """Whether the server is about to leave."""
        return self.state is State.DRAINING

    def pause(self) -> None:
        """Take up nothing new; what is in flight goes on. A server that drains goes on draining."""
        self._turn(State.PAUSED)

    def resume(self) -> None:
        """Take up groups again. A server that drains goes on draining."""
        self._turn(State.OPEN)

    def drain(self, *, now: bool = False) -> None:
        """Take up nothing more, and leave once what is in flight has finished, or `now` with partials."""
        self._turn(State.DRAINING)
        if now:
            self.hurry.set()

    async def may_admit(self) -> bool:
        """Wait while it is paused; False once it drains."""
        while self.state is State.PAUSED:
            self._turned.clear()
            await self._turned.wait()
        return self.is_open

    def _turn(self, state: State) -> None:
        if state is not self.state and not self.is_draining:
            log.info("admission of groups", state=state.value)
            self.state = state
            self._turned.set()
