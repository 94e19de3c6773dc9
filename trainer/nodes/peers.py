"""Whether the other nodes are still there, and what they say of themselves.

Node 0 has a line to every other node, each of these one to node 0, which passes on what concerns all. A node
that is killed is known by the end of its connection, one whose machine or network is gone by its silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from async_grpo.errors import NodeLost
from async_grpo.network import LOOPBACK
from trainer.nodes.line import Line
from trainer.nodes.messages import Beat, Ended, Message, Stop, Stopped

BEATS_OF_SILENCE = 8


class StoppedEarly(Exception):
    """The trainer was asked to stop before its ranks had joined the run, and has nothing to save; not an error."""


class Peers:
    """The nodes at the other ends of this one's lines; none for a node that is alone."""

    def __init__(self, lines: Iterable[Line], silence_s: float) -> None:
        self.stop_asked = asyncio.Event()
        """One of them wants the trainer to stop."""
        self._lines = list(lines)
        self._silence_s = silence_s
        self._following: list[asyncio.Task[None]] = []

    @property
    def own_address(self) -> str:
        """Of this machine, in figures, on the network that reaches the others; of the loopback if there are none."""
        return self._lines[0].own_address if self._lines else LOOPBACK

    def tell(self, message: Message) -> None:
        """All of them; those that are gone do not hear it."""
        for line in self._lines:
            line.send(message)

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """As long as the block lasts, they are told that this node is there, whatever they have said of their own end,
        and are listened to."""
        beating = asyncio.create_task(self._beat())
        self._following = [asyncio.create_task(self._follow(line)) for line in self._lines]
        try:
            yield
        finally:
            for task in (beating, *self._following):
                task.cancel()
            await asyncio.gather(beating, *self._following, return_exceptions=True)

    async def watch(self) -> None:
        """Until all have ended as they should. Raises NodeLost or WireError for the first that has not, StoppedEarly
        if one says so."""
        if not self._following:
            return
        ended, _ = await asyncio.wait(self._following, return_when=asyncio.FIRST_EXCEPTION)
        for following in ended:
            following.result()

    async def left(self, timeout_s: float) -> None:
        """Until all have ended, however they did, but no longer than that."""
        await asyncio.wait(self._following, timeout=timeout_s)

    async def _follow(self, line: Line) -> None:
        while True:
            try:
                async with asyncio.timeout(self._silence_s):
                    message = await line.receive()
            except TimeoutError:
                raise NodeLost(
                    f"{line.peer} was not heard for {self._silence_s:g} s (trainer.rendezvous.silence_s): its machine "
                    "or its network is gone"
                ) from None
            match message:
                case Stop():
                    self.stop_asked.set()
                case Stopped():
                    raise StoppedEarly
                case Ended(reason=""):
                    return
                case Ended(reason=reason):
                    raise NodeLost(f"{line.peer} has ended: {reason}")

    async def _beat(self) -> None:
        while True:
            self.tell(Beat())
            await asyncio.sleep(self._silence_s / BEATS_OF_SILENCE)
