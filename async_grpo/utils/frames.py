"""Length-prefixed frames, which separate the messages on a stream of bytes.

    4 bytes (big-endian): length of the payload | payload

Every reader has a limit, so that a few stray bytes in a stream cannot claim gigabytes. This module imports little,
because every verifier process loads it.
"""

from __future__ import annotations

import asyncio
import struct
from typing import BinaryIO

from async_grpo.errors import WireError

LENGTH = struct.Struct(">I")


def pack_frame(payload: bytes, max_bytes: int) -> bytes:
    """Return the payload as a frame. Raises ValueError above `max_bytes`."""
    if len(payload) > max_bytes:
        raise ValueError(f"a message of {len(payload)} bytes is above the limit of {max_bytes}")
    return LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Reads the frames of one stream. A cancelled `next` loses nothing: the next call continues it."""

    def __init__(self, stream: asyncio.StreamReader, max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._length: int | None = None

    async def next(self) -> bytes:
        """Return the payload of the next frame.

        Raises IncompleteReadError when the stream has ended, and WireError if the frame is above the limit.
        """
        if self._length is None:
            self._length = _parse_length(await self._stream.readexactly(LENGTH.size), self._max_bytes)
        payload = await self._stream.readexactly(self._length)
        self._length = None
        return payload


def read_frame(stream: BinaryIO, max_bytes: int) -> bytes | None:
    """Return the payload of the next frame of a blocking stream; None at its end. Raises WireError above the limit."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return stream.read(_parse_length(head, max_bytes))


def take_frame(received: bytearray, max_bytes: int) -> bytes | None:
    """Remove the first frame from `received` and return its payload; None if it is not complete.

    Raises WireError above the limit.
    """
    if len(received) < LENGTH.size:
        return None
    end = LENGTH.size + _parse_length(received[: LENGTH.size], max_bytes)
    if len(received) < end:
        return None
    payload = bytes(received[LENGTH.size : end])
    del received[:end]
    return payload


def _parse_length(head: bytes | bytearray, max_bytes: int) -> int:
    length: int = LENGTH.unpack(head)[0]
    if length > max_bytes:
        raise WireError(
            f"a frame claims {length} bytes, above the limit of {max_bytes}: another program wrote to this stream"
        )
    return length
