"""The other nodes of the trainer: messages between nodes, connections, and detection of lost nodes.

    node R --Hello--> node 0      --Refused, Busy, Start--> node R
    both:  NodeAlive, Stop, Stopped, Ended

Node 0 is connected to every other node, and each of those to node 0. A killed node is detected by the end of its
connection; a lost machine or network by missing heartbeats. A frame is its length (4 bytes, big-endian) and one record.
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
"""Heartbeats that are sent within `rendezvous.silence_s`."""


class Hello(Record, frozen=True, kw_only=True, tag="hello"):
    """A node introduces itself."""

    id: str
    rank: int
    nodes: int
    processes: int
    """Ranks of all nodes together."""


class Refused(Record, frozen=True, kw_only=True, tag="refused"):
    """Node 0 rejects a node, whose configuration must be corrected first."""

    reason: str


class Busy(Record, frozen=True, kw_only=True, tag="busy"):
    """All nodes have met already, perhaps with an earlier process of this node: try again later."""


class Start(Record, frozen=True, kw_only=True, tag="start"):
    """All nodes have joined: start the ranks."""


class NodeAlive(Record, frozen=True, kw_only=True, tag="beat"):
    """A node is still alive."""


class Stop(Record, frozen=True, kw_only=True, tag="stop"):
    """A node was asked to stop the trainer (SIGTERM); rank 0 decides when it stops."""


class Stopped(Record, frozen=True, kw_only=True, tag="stopped"):
    """SIGTERM has ended a rank before it joined the run, so there is nothing to save.

    Like `Ended`, it is the last message of a node.
    """


class Ended(Record, frozen=True, kw_only=True, tag="ended"):
    """The ranks of this node have ended; `reason` is "" if they succeeded."""

    reason: str
    config_fault: bool = False
    """True if a restart would fail again: the configuration, the data or the installation is wrong."""


Message = Hello | Refused | Busy | Start | NodeAlive | Stop | Stopped | Ended


_decoder = msgspec.msgpack.Decoder(Message)


M = TypeVar("M", bound=Message)


class PeerConnection:
    """One end of a connection between two nodes. `peer` names the other one in errors: `node 1 (10.0.0.6)`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> None:
        self.peer = peer
        self._frames = FrameReader(reader, MAX_FRAME_BYTES)
        self._writer = writer

    @property
    def own_address(self) -> str:
        """Address of this machine on the network that reaches the peer."""
        address: str = self._writer.get_extra_info("sockname")[0]
        return address

    def send(self, message: Message) -> None:
        """Send a message without waiting. Frames are small, and a peer that hangs is detected by its heartbeats."""
        self._writer.write(pack_frame(encode(message), MAX_FRAME_BYTES))

    async def receive(self) -> Message:
        """Wait for the next message. Raises NodeLost if the connection ends, WireError for an invalid message."""
        try:
            return _decoder.decode(await self._frames.next())
        except (asyncio.IncompleteReadError, OSError) as error:
            raise NodeLost(f"{self.peer} is gone: its connection has ended ({error})") from None
        except WireError as error:
            raise WireError(f"{self.peer}: {error}") from None
        except msgspec.MsgspecError as error:
            raise WireError(f"{self.peer} sent something that is no message of this release: {error}") from None

    async def expect(self, kind: type[M]) -> M:
        """Wait for the next message, which must be of this kind. Raises NodeLost, WireError."""
        message = await self.receive()
        if not isinstance(message, kind):
            raise WireError(f"{self.peer} sent {type(message).__name__} where {kind.__name__} was expected")
        return message

    async def close(self) -> None:
        """Close the connection, after at most one second in which the peer can read what was sent."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()


class StoppedEarly(Exception):
    """The trainer was stopped before its ranks had joined the run, so there is nothing to save. Not an error."""


class Peers:
    """The nodes that this one is connected to; none for a single node."""

    def __init__(self, connections: Iterable[PeerConnection], silence_s: float) -> None:
        self.stop_asked = asyncio.Event()
        """Set when a peer asks to stop the trainer."""
        self._connections = list(connections)
        self._silence_s = silence_s
        self._receivers: list[asyncio.Task[None]] = []

    @property
    def own_address(self) -> str:
        """IP address of this machine on the network that reaches the peers; the loopback without peers."""
        return self._connections[0].own_address if self._connections else LOOPBACK

    def broadcast(self, message: Message) -> None:
        """Send a message to all peers that are still connected."""
        for connection in self._connections:
            connection.send(message)

    @asynccontextmanager
    async def exchange_heartbeats(self) -> AsyncIterator[None]:
        """Send heartbeats and receive messages within the block."""
        beating = asyncio.create_task(self._beat())
        self._receivers = [asyncio.create_task(self._receive_from(connection)) for connection in self._connections]
        try:
            yield
        finally:
            await cancel_and_wait(beating, *self._receivers)

    async def wait_for_success(self) -> None:
        """Wait until all peers have ended successfully.

        Raises NodeLost, ConfigError or WireError for the first peer that fails, StoppedEarly if one was stopped early.
        """
        if not self._receivers:
            return
        ended, _ = await asyncio.wait(self._receivers, return_when=asyncio.FIRST_EXCEPTION)
        for receiver in ended:
            receiver.result()

    async def wait_until_gone(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until all peers have ended, successfully or not."""
        await asyncio.wait(self._receivers, timeout=timeout_s)

    async def _receive_from(self, connection: PeerConnection) -> None:
        while True:
            try:
                async with asyncio.timeout(self._silence_s):
                    message = await connection.receive()
            except TimeoutError:
                raise NodeLost(
                    f"{connection.peer} sent nothing for {self._silence_s:g} s (trainer.rendezvous.silence_s): its "
                    "machine or its network is gone"
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
            self.broadcast(NodeAlive())
            await asyncio.sleep(self._silence_s / BEATS_OF_SILENCE)
