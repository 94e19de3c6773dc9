"""Between the receiver process of a machine and the rollout servers on it, over a Unix socket.

    server --Hello, Follow, Hold, Release-->  receiver
           <--State, Held, Failed---------------

A frame is its length (4 bytes, big-endian) and one MessagePack record. The connection itself carries
a fact too: it ends when either process ends, however that happens.
"""

from __future__ import annotations

import struct

from async_grpo.errors import WireError
from async_grpo.weights.stats import ReceiverStats
from async_grpo.wire import encode
from async_grpo.wire.board import PublisherAddress
from async_grpo.wire.records import Record

MAX_FRAME_BYTES = 1 << 20
LENGTH = struct.Struct(">I")


class Hello(Record, frozen=True, kw_only=True, tag="hello"):
    """A server is there. `has` is what it took from the store last, if anything: the store is then worth keeping."""

    name: str
    has: tuple[int, int] | None = None
    holding: tuple[int, int] | None = None


class Follow(Record, frozen=True, kw_only=True, tag="follow"):
    """The publisher that the run board names; one of an older epoch than that of another server is ignored."""

    address: PublisherAddress


class Hold(Record, frozen=True, kw_only=True, tag="hold"):
    """Leave the newest version alone until `Release`: an engine loads it."""

    number: int


class Release(Record, frozen=True, kw_only=True, tag="release"):
    """The engine has loaded it, or given up."""


class State(Record, frozen=True, kw_only=True, tag="state"):
    """At every new version and every heartbeat. `publisher` is "" while none is known."""

    newest: tuple[int, int] | None = None
    publisher: str = ""
    epoch: int = -1
    silent_s: float = 0.0
    servers: int = 0
    """How many are connected."""
    stats: ReceiverStats


class Held(Record, frozen=True, kw_only=True, tag="held"):
    """The answer to the hold of that number: this version is left alone; None if there is none yet."""

    number: int
    identity: tuple[int, int] | None = None


class Failed(Record, frozen=True, kw_only=True, tag="failed"):
    """The receiver ends because of this; `corrupt` tells which error it is for the server."""

    message: str
    corrupt: bool = False


ToReceiver = Hello | Follow | Hold | Release
ToServer = State | Held | Failed


def frame(message: Record) -> bytes:
    """The message as it goes over the socket."""
    payload = encode(message)
    return LENGTH.pack(len(payload)) + payload


def frame_length(header: bytes) -> int:
    """Raises WireError if the frame would be larger than any of ours."""
    (length,) = LENGTH.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {length} bytes on the receiver's socket, the limit is {MAX_FRAME_BYTES}.")
    return int(length)
