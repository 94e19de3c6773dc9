"""The receiver's connections to the publisher and to the parent from which it fetches chunks.

    publisher --announcements (SUB), parent and manifests (DEALER)--> PublisherConnection
    parent (publisher or relay) --chunks (DEALER), its end (monitor)--> ParentConnection

Neither waits; the receiver's loop polls their sockets. A message that this release cannot read is a PeerUnreadable: a
relay that sends one is left for another parent, and a publisher's ends the receiver.
"""

from __future__ import annotations

import time
from collections.abc import Container
from contextlib import suppress

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from async_grpo.errors import WeightsError, WireError
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.node.fetch import Fetch
from async_grpo.weights.zmq.messages import (
    Announcement,
    ChunkAnswer,
    ChunkPending,
    ChunkReply,
    ChunkRequest,
    FetchDone,
    ManifestReply,
    ManifestRequest,
    ParentAssignment,
    ReceiverHeartbeat,
    ReceiverLeaving,
    TrackerReply,
    VersionGone,
    sign,
)
from async_grpo.weights.zmq.sockets import Context, CurveKeys, Socket, connect
from async_grpo.wire import decode, encode
from async_grpo.wire.board import PublisherAddress

_FRAME_OVERHEAD_BYTES = 4096
MAX_MANIFEST_BYTES = 256 << 20
"""Room for the hashes of ten million chunks; a larger message ends the connection."""

_answers = msgspec.msgpack.Decoder(ChunkAnswer)
_replies = msgspec.msgpack.Decoder(TrackerReply)


class PeerUnreadable(WeightsError):
    """A publisher or relay sent a message that this release cannot read."""

    def __init__(self, endpoint: str, error: Exception) -> None:
        super().__init__(
            f"{endpoint} sent a message that this release cannot read ({error}). Does another release, or another "
            "program, listen there? Run the trainer and all rollout servers with one release"
        )


class ParentConnection:
    """DEALER sockets to a parent, and monitors that report when one of their connections breaks.

    A chunk is asked for by the socket of its number, so that answers of one socket come in the order of its requests.
    """

    def __init__(
        self, context: Context, assignment: ParentAssignment, chunk_bytes: int, keys: CurveKeys | None, sockets: int = 1
    ) -> None:
        """Connect in the background."""
        self.endpoint, self.is_relay = assignment.parent, assignment.relay
        self.heard_s = time.monotonic()
        self.broken = False
        self.dealers = [context.socket(zmq.DEALER) for _ in range(sockets)]
        self.monitors: list[Socket] = [each.get_monitor_socket(zmq.EVENT_DISCONNECTED) for each in self.dealers]
        for dealer in self.dealers:
            connect(dealer, self.endpoint, chunk_bytes + _FRAME_OVERHEAD_BYTES, keys)

    @property
    def sockets(self) -> list[Socket]:
        """Sockets to poll for reading."""
        return [*self.dealers, *self.monitors]

    def request_chunks(self, fetch: Fetch) -> None:
        """Request the chunks that are due. A request is dropped if nothing can be sent, because it is repeated."""
        for index, patch in fetch.schedule.take_requests(time.monotonic()):
            signature = sign(fetch.manifest.key, fetch.identity, index, patch)
            request = ChunkRequest(**fetch.identity._asdict(), index=index, patch=patch, signature=signature)
            self._send(self.dealers[index % len(self.dealers)], request)

    def finish_version(self, identity: WeightVersion) -> None:
        """Tell the parent that this version is fetched."""
        for dealer in self.dealers:
            self._send(dealer, FetchDone(**identity._asdict()))

    def receive_answer(self, dealer: Socket) -> tuple[ChunkReply | VersionGone | ChunkPending, memoryview] | None:
        """The next answer of one of the sockets and its payload; None if there is none. Raises PeerUnreadable."""
        try:
            frames = dealer.recv_multipart(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None
        self.heard_s = time.monotonic()
        try:
            return _answers.decode(frames[0].buffer), frames[-1].buffer
        except msgspec.MsgspecError as error:
            raise PeerUnreadable(self.endpoint, error) from error

    def ready(self, polled: Container[object]) -> list[Socket]:
        """The sockets with answers among those that were polled. Notes a connection that broke."""
        for monitor in self.monitors:
            if monitor in polled:
                recv_monitor_message(monitor)
                self.broken = True
        return [dealer for dealer in self.dealers if dealer in polled]

    def close(self) -> None:
        """Close the sockets."""
        for dealer, monitor in zip(self.dealers, self.monitors, strict=True):
            dealer.disable_monitor()
            monitor.close()
            dealer.close()

    def _send(self, dealer: Socket, message: ChunkRequest | FetchDone) -> None:
        with suppress(zmq.Again):
            dealer.send(encode(message), zmq.DONTWAIT)


class PublisherConnection:
    """Two sockets to the publisher at `address`, polled by the receiver's loop."""

    def __init__(self, context: Context, address: PublisherAddress, keys: CurveKeys | None) -> None:
        """Connect in the background."""
        self.address = address
        self.announced: WeightVersion | None = None
        self.assignment: ParentAssignment | None = None
        self.announcements = context.socket(zmq.SUB)
        self.announcements.setsockopt(zmq.CONFLATE, 1)  # only the newest announcement matters
        self.announcements.setsockopt(zmq.SUBSCRIBE, b"")
        self.requests = context.socket(zmq.DEALER)
        connect(self.announcements, address.announce, MAX_MANIFEST_BYTES, keys)
        connect(self.requests, address.requests, MAX_MANIFEST_BYTES, keys)

    @property
    def sockets(self) -> list[Socket]:
        """Sockets to poll for reading."""
        return [self.announcements, self.requests]

    def receive_announcement(self) -> None:
        """Take the announcement that has come. Raises PeerUnreadable."""
        try:
            self.announced = decode(self.announcements.recv(), Announcement).identity
        except WireError as error:
            raise PeerUnreadable(self.address.announce, error) from error

    def receive_reply(self) -> ManifestReply | None:
        """Take the reply that has come, and return it unless it is the assignment. Raises PeerUnreadable."""
        try:
            reply = _replies.decode(self.requests.recv())
        except msgspec.MsgspecError as error:
            raise PeerUnreadable(self.address.requests, error) from error
        if isinstance(reply, ParentAssignment):
            self.assignment = reply
            return None
        return reply

    def send(self, message: ReceiverHeartbeat | ReceiverLeaving | ManifestRequest) -> None:
        """Send the message; it is dropped if nothing can be sent, because all of these are repeated."""
        with suppress(zmq.Again):
            self.requests.send(encode(message), zmq.DONTWAIT)

    def close(self) -> None:
        """Close the sockets."""
        for owned in self.sockets:
            owned.close()
