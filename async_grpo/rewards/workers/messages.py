"""The languages of the pool: frames between a slot and its worker, notes between the pool and its warden.

slot   --Assignment-->  worker    4 bytes of length, then MessagePack, over a stream that only they hold
slot   <--Hello, Answer--  worker
pool   --Spawn (with the worker's channel), Kill-->  warden       a note is a packet
pool   <--Ended--  warden
"""

from __future__ import annotations

import asyncio
import struct
from typing import BinaryIO, TypeVar

import msgspec

from async_grpo.errors import WireError

M = TypeVar("M", bound=msgspec.Struct)

_LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 256 << 20
MAX_ANSWER_BYTES = 1 << 20
MAX_NOTE_BYTES = 64 << 10


class WorkerReady(msgspec.Struct, frozen=True):
    """The worker's first words: the verifiers that it could not load, and why."""

    broken: dict[str, str] = {}
    extracting: list[str] = []
    """The verifiers that find the answer in a completion."""


class VerifierRequest(msgspec.Struct, frozen=True):
    """One completion for the verifiers `names`, in order: to judge it, or, with `extract`, to find the answer in it."""

    names: list[str]
    completion: str
    answer: str
    prompt: str = ""
    metadata: dict[str, str] = {}
    tool_calls: int = 0
    extract: bool = False


class VerifierReply(msgspec.Struct, frozen=True):
    """Of one verifier: a score, or the kind of failure and its reason. Of an extraction: a text (None: there is no
    answer in the completion), or the same."""

    score: float | None = None
    kind: str = ""
    reason: str = ""
    text: str | None = None


class SpawnWorker(msgspec.Struct, frozen=True, tag="spawn"):
    """Start a worker; the descriptor of its channel comes with the note."""

    worker: int


class KillWorker(msgspec.Struct, frozen=True, tag="kill"):
    """End a worker and everything that it started."""

    worker: int


class WorkerExited(msgspec.Struct, frozen=True, tag="ended"):
    """A worker has ended, with everything that it started.

    code: its exit code, or minus the signal. cause: "" (it ended by itself), "killed" (it was told to),
    "memory" (the warden's own decision), "lost" (the warden itself has ended). output: the last it printed.
    """

    worker: int
    code: int
    cause: str = ""
    output: str = ""


class FrameReader:
    """Frames of one stream. A `next` that is cancelled loses nothing: the following one goes on from there."""

    def __init__(self, stream: asyncio.StreamReader, max_bytes: int = MAX_ANSWER_BYTES) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._length: int | None = None

    async def next(self, kind: type[M]) -> M:
        """The next message.

        Raises IncompleteReadError when the other side has ended, and WireError if what it wrote is no frame.
        """
        if self._length is None:
            self._length = _length(await self._stream.readexactly(_LENGTH.size), self._max_bytes)
        body = await self._stream.readexactly(self._length)
        self._length = None
        return _decode(body, kind)


def pack(message: msgspec.Struct) -> bytes:
    """Message -> frame. Raises ValueError for one that is too large to be meant."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is above the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def read_frame_blocking(stream: BinaryIO, kind: type[M]) -> M | None:
    """The next message of the stream, or None at its end. Raises WireError if it is no frame."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    return _decode(stream.read(_length(head, MAX_FRAME_BYTES)), kind)


def _length(head: bytes, max_bytes: int) -> int:
    """Bounded, so that a few stray bytes in a stream cannot claim gigabytes."""
    length: int = _LENGTH.unpack(head)[0]
    if length > max_bytes:
        raise WireError(f"a frame claims {length} bytes, above the limit of {max_bytes}: something else wrote it")
    return length


def _decode(body: bytes, kind: type[M]) -> M:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise WireError(f"a frame is not a {kind.__name__}: {error}") from error
