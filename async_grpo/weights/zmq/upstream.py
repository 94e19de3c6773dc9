"""The receiver's connections to the publisher and to the parent from which it fetches chunks.

    publisher --announcements (SUB), parents and manifests (DEALER)--> PublisherConnection
    parent (publisher or relay) --chunks (DEALER), disconnects (monitor)--> ParentConnection

Neither waits: the receiver's loop polls their sockets. A message that this release cannot decode raises PeerUnreadable:
the receiver leaves a relay that sends one, and ends if the publisher does.
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
"""Enough for the hashes of ten million chunks. A larger message closes the connection."""

_answers = msgspec.msgpack.Decoder(ChunkAnswer)
_replies = msgspec.msgpack.Decoder(TrackerReply)


class PeerUnreadable(WeightsError):
    """A publisher or relay sent a message that this release cannot read."""

    def __init__(self, endpoint: str, error: Exception) -> None:
        super().__init__(
            f"{endpoint} sent a message that this release cannot read ({error}). Is another release or another program "
            "listening there? Run the trainer and all rollout servers with the same release"
        )


class ParentConnection:
    """DEALER sockets to a parent, with monitors that report broken connections.

    A chunk is always requested over socket number `index % sockets`, and a socket's answers arrive in the order of its
    requests. `ChunkSchedule.put_back_late` needs this to tell lost chunks from queued ones.
    """

    def __init__(
        self, context: Context, assignment: ParentAssignment, chunk_bytes: int, keys: CurveKeys | None, sockets: int = 1
    ) -> None:
        """Connect in the background."""
        self.endpoint = assignment.parent
        self.is_relay = assignment.relay
        self.heard_s = time.monotonic()
        self.broken = False
        self.dealers: list[Socket] = []
        self.monitors: list[Socket] = []
        for _ in range(sockets):
            dealer = context.socket(zmq.DEALER)
            self.dealers.append(dealer)
            self.monitors.append(dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED))
            connect(dealer, self.endpoint, chunk_bytes + _FRAME_OVERHEAD_BYTES, keys)

    @property
    def sockets(self) -> list[Socket]:
        """Sockets to poll for reading."""
        return [*self.dealers, *self.monitors]

    def request_chunks(self, fetch: Fetch) -> None:
        """Request the chunks that are due. A request that cannot be sent now is dropped and later repeated."""
        for index, patch in fetch.schedule.take_requests(time.monotonic()):
            signature = sign(fetch.manifest.key, fetch.identity, index, patch)
            request = ChunkRequest(**fetch.identity._asdict(), index=index, patch=patch, signature=signature)
            self._send(self.dealers[index % len(self.dealers)], request)

    def finish_version(self, identity: WeightVersion) -> None:
        """Send the parent `FetchDone`, so that it may overwrite the version."""
        for dealer in self.dealers:
            self._send(dealer, FetchDone(**identity._asdict()))

    def receive_answer(self, dealer: Socket) -> tuple[ChunkReply | VersionGone | ChunkPending, memoryview] | None:
        """Return the socket's next answer and its payload; None if there is none. Raises PeerUnreadable."""
        try:
            frames = dealer.recv_multipart(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None
        self.heard_s = time.monotonic()
        try:
            return _answers.decode(frames[0].buffer), frames[-1].buffer
        except msgspec.MsgspecError as error:
            raise PeerUnreadable(self.endpoint, error) from error

    def check_monitors(self, readable: Container[object]) -> None:
        """Set `broken` if one of the readable monitors reports a disconnect."""
        for monitor in self.monitors:
            if monitor in readable:
                recv_monitor_message(monitor)
                self.broken = True

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
    """SUB and DEALER sockets to the publisher at `address`."""

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
        """Read an announcement into `announced`. Raises PeerUnreadable."""
        try:
            self.announced = decode(self.announcements.recv(), Announcement).identity
        except WireError as error:
            raise PeerUnreadable(self.address.announce, error) from error

    def receive_reply(self) -> ManifestReply | None:
        """Read a reply. An assignment is stored in `assignment`; a manifest is returned. Raises PeerUnreadable."""
        try:
            reply = _replies.decode(self.requests.recv())
        except msgspec.MsgspecError as error:
            raise PeerUnreadable(self.address.requests, error) from error
        if isinstance(reply, ParentAssignment):
            self.assignment = reply
            return None
        return reply

    def send(self, message: ReceiverHeartbeat | ReceiverLeaving | ManifestRequest) -> None:
        """Send a message, or drop it if the socket cannot send now: all of these messages are repeated."""
        with suppress(zmq.Again):
            self.requests.send(encode(message), zmq.DONTWAIT)

    def close(self) -> None:
        """Close the sockets."""
        for zmq_socket in self.sockets:
            zmq_socket.close()
