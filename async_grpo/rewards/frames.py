"""The language of the pipes between the pool and its workers: 4 bytes of length, then MessagePack."""

from __future__ import annotations

import asyncio
import struct
from typing import BinaryIO, TypeVar

import msgspec

from async_grpo.errors import WireError

M = TypeVar("M", bound=msgspec.Struct)

_LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 256 << 20


class Hello(msgspec.Struct, frozen=True):
    """The worker's first words; `error` says why it cannot work."""

    error: str = ""


class Assignment(msgspec.Struct, frozen=True):
    """Items to judge, in order: (completion, reference answer)."""

    items: list[tuple[str, str]]


class Score(msgspec.Struct, frozen=True):
    """The answer for one item: scores by verifier name, or the error of the verifier."""

    scores: dict[str, float]
    error: str = ""


def pack(message: msgspec.Struct) -> bytes:
    """Message -> frame. Raises ValueError for one that is too large to be meant."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is above the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


async def read_frame(stream: asyncio.StreamReader, kind: type[M]) -> M:
    """The next message of the pipe.

    Raises IncompleteReadError when the other side has ended, and WireError if what it wrote is no frame.
    """
    length = _length(await stream.readexactly(_LENGTH.size))
    return _decode(await stream.readexactly(length), kind)


def read_frame_blocking(stream: BinaryIO, kind: type[M]) -> M | None:
    """The next message of the pipe, or None at its end. Raises WireError if it is no frame."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    return _decode(stream.read(_length(head)), kind)


def _length(head: bytes) -> int:
    """Bounded, so that a few stray bytes in a pipe cannot claim gigabytes."""
    length: int = _LENGTH.unpack(head)[0]
    if length > MAX_FRAME_BYTES:
        raise WireError(f"a frame claims {length} bytes, above the limit of {MAX_FRAME_BYTES}: something else wrote it")
    return length


def _decode(body: bytes, kind: type[M]) -> M:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise WireError(f"a frame is not a {kind.__name__}: {error}") from error
