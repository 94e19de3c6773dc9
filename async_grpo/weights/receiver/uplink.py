"""The receiver's line to one publisher: announcements, heartbeats, assignments, manifests."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import zmq

from async_grpo.weights.keys import Keys
from async_grpo.weights.manifest import Identity, Manifest
from async_grpo.weights.messages import (
    Announcement,
    Assignment,
    Beat,
    Leave,
    ManifestReply,
    ManifestRequest,
    TrackerReply,
)
from async_grpo.weights.sockets import Context, Socket, connect
from async_grpo.wire import decode, encode
from async_grpo.wire.board import PublisherAddress

MAX_MANIFEST_BYTES = 256 << 20
"""Room for the hashes of ten million chunks; a larger message ends the connection."""

_replies = msgspec.msgpack.Decoder(TrackerReply)


class Uplink:
    """Two sockets to the publisher at `address`, polled by the receiver's loop."""

    def __init__(self, context: Context, address: PublisherAddress, keys: Keys | None) -> None:
        """Connects in the background."""
        self.address = address
        self.heard_s = time.monotonic()
        self.announced: Identity | None = None
        self.assignment: Assignment | None = None
        self.announcements = context.socket(zmq.SUB)
        self.announcements.setsockopt(zmq.CONFLATE, 1)  # only the newest announcement matters
        self.announcements.setsockopt(zmq.SUBSCRIBE, b"")
        self.requests = context.socket(zmq.DEALER)
        connect(self.announcements, address.announce, MAX_MANIFEST_BYTES, keys)
        connect(self.requests, address.requests, MAX_MANIFEST_BYTES, keys)

    @property
    def sockets(self) -> list[Socket]:
        """To be polled."""
        return [self.announcements, self.requests]

    def hear(self) -> None:
        """An announcement is there."""
        self.announced = decode(self.announcements.recv(), Announcement).identity
        self.heard_s = time.monotonic()

    def receive(self, on_manifest: Callable[[Manifest | None], None]) -> None:
        """A reply is there; a manifest is handed on."""
        reply = _replies.decode(self.requests.recv())
        self.heard_s = time.monotonic()
        match reply:
            case Assignment():
                self.assignment = reply
            case ManifestReply(manifest=manifest):
                on_manifest(manifest)

    def send(self, message: Beat | Leave | ManifestRequest) -> None:
        """Dropped if the publisher has not taken anything for long: all of these are repeated."""
        try:
            self.requests.send(encode(message), zmq.DONTWAIT)
        except zmq.Again:
            return

    def close(self) -> None:
        """Close the sockets."""
        for owned in self.sockets:
            owned.close()
