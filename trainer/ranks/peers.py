"""The other nodes of the trainer: the messages between nodes, the connections, and whether the nodes are still alive.

    node R --Hello--> node 0      --Refused, Busy, Start--> node R
    both:  NodeAlive, Stop, Stopped, Ended      and the connection itself, which ends when either process does

Node 0 has a connection to every other node, and each of them one to node 0, which passes on what concerns all. A killed
node is noticed by the end of its connection, one whose machine or network is gone by its silence. A frame is its length
(4 bytes, big-endian) and one record.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec

from async_grpo.errors import ConfigError, NodeLost, WireError
from async_grpo.utils.aio import cancel_and_wait
from async_grpo.utils.frames import FrameReader, pack_frame
from async_grpo.utils.network import LOOPBACK
from async_grpo.wire import encode
from async_grpo.wire.records import Record

MAX_FRAME_BYTES = 1 << 20
BEATS_OF_SILENCE = 8


class Hello(Record, frozen=True, kw_only=True, tag="hello"):
    """A node introduces itself."""

    id: str
    rank: int
    nodes: int
    processes: int
    """Ranks of all nodes together."""


class Refused(Record, frozen=True, kw_only=True, tag="refused"):
    """Node 0 refuses a node, which must be corrected first."""

    reason: str


class Busy(Record, frozen=True, kw_only=True, tag="busy"):
    """All nodes have met already, perhaps with an earlier process of this one: ask again."""


class Start(Record, frozen=True, kw_only=True, tag="start"):
    """All nodes are there: start the ranks."""


class NodeAlive(Record, frozen=True, kw_only=True, tag="beat"):
    """A node is still alive."""


class Stop(Record, frozen=True, kw_only=True, tag="stop"):
    """A node was asked to stop the trainer (SIGTERM); rank 0 decides when it stops."""


class Stopped(Record, frozen=True, kw_only=True, tag="stopped"):
    """SIGTERM has ended a rank before it joined the run: there is nothing to save, and no rank will stop the others.

    Like `Ended`, it is the last message of a node.
    """


class Ended(Record, frozen=True, kw_only=True, tag="ended"):
    """The ranks of this node have ended; the reason is "" if they succeeded."""

    reason: str
    config_fault: bool = False
    """No restart would help: the configuration, the data or the installation is at fault."""


Message = Hello | Refused | Busy | Start | NodeAlive | Stop | Stopped | Ended


_decoder = msgspec.msgpack.Decoder(Message)


M = TypeVar("M", bound=Message)


class PeerConnection:
    """One end of a connection between two nodes. `peer` names the other one in errors: `node 1 (10.0.0.6)`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> None:
        self.peer = peer
        self._frames, self._writer = FrameReader(reader, MAX_FRAME_BYTES), writer

    @property
    def own_address(self) -> str:
        """The address of this machine on the network that reaches the other end."""
        address: str = self._writer.get_extra_info("sockname")[0]
        return address

    def send(self, message: Message) -> None:
        """Send a message without waiting: frames are small, and a peer that reads none is found by its silence."""
        self._writer.write(pack_frame(encode(message), MAX_FRAME_BYTES))

    async def receive(self) -> Message:
        """The next message. Raises NodeLost when the connection ends, WireError for anything that is no message."""
        try:
            return _decoder.decode(await self._frames.next())
        except (asyncio.IncompleteReadError, OSError) as error:
            raise NodeLost(f"{self.peer} is gone: its connection has ended ({error})") from None
        except WireError as error:
            raise WireError(f"{self.peer}: {error}") from None
        except msgspec.MsgspecError as error:
            raise WireError(f"{self.peer} sends something that is no message of this release: {error}") from None

    async def expect(self, kind: type[M]) -> M:
        """The next message, which must be of that kind. Raises NodeLost, WireError."""
        message = await self.receive()
        if not isinstance(message, kind):
            raise WireError(f"{self.peer} sent {type(message).__name__} where {kind.__name__} was expected")
        return message

    async def close(self) -> None:
        """Close the connection; what was sent goes out first, if the peer reads it within a second."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()


class StoppedEarly(Exception):
    """The trainer was asked to stop before its ranks had joined the run, and has nothing to save; not an error."""


class Peers:
    """The nodes to which this one is connected; none for a single node."""

    def __init__(self, connections: Iterable[PeerConnection], silence_s: float) -> None:
        self.stop_asked = asyncio.Event()
        """Set when one of them asks the trainer to stop."""
        self._lines = list(connections)
        self._silence_s = silence_s
        self._following: list[asyncio.Task[None]] = []

    @property
    def own_address(self) -> str:
        """The IP address of this machine on the network that reaches the others; the loopback if there are none."""
        return self._lines[0].own_address if self._lines else LOOPBACK

    def tell(self, message: Message) -> None:
        """Send a message to all of them; those that are gone do not receive it."""
        for connection in self._lines:
            connection.send(message)

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """Send heartbeats to them and listen to them within the block, also after they have announced their end."""
        beating = asyncio.create_task(self._beat())
        self._following = [asyncio.create_task(self._follow(connection)) for connection in self._lines]
        try:
            yield
        finally:
            await cancel_and_wait(beating, *self._following)

    async def watch(self) -> None:
        """Wait until all have ended successfully.

        Raises NodeLost, ConfigError or WireError for the first that has not, StoppedEarly if one says so.
        """
        if not self._following:
            return
        ended, _ = await asyncio.wait(self._following, return_when=asyncio.FIRST_EXCEPTION)
        for following in ended:
            following.result()

    async def left(self, timeout_s: float) -> None:
        """Wait until all have ended, successfully or not, but at most `timeout_s`."""
        await asyncio.wait(self._following, timeout=timeout_s)

    async def _follow(self, connection: PeerConnection) -> None:
        while True:
            try:
                async with asyncio.timeout(self._silence_s):
                    message = await connection.receive()
            except TimeoutError:
                raise NodeLost(
                    f"{connection.peer} was not heard for {self._silence_s:g} s (trainer.rendezvous.silence_s): "
                    "its machine or its network is gone"
                ) from None
            match message:
                case Stop():
                    self.stop_asked.set()
                case Stopped():
                    raise StoppedEarly
                case Ended(reason=""):
                    return
                case Ended(reason=reason, config_fault=config_fault):
                    kind = ConfigError if config_fault else NodeLost
                    raise kind(f"{connection.peer} has ended: {reason}")

    async def _beat(self) -> None:
        while True:
            self.tell(NodeAlive())
            await asyncio.sleep(self._silence_s / BEATS_OF_SILENCE)
