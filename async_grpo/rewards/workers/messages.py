"""The languages of the pool: frames between a slot and its worker, notes between the pool and its warden.

slot   --Assignment-->  worker    4 bytes of length, then MessagePack, over a stream that only they hold
slot   <--Hello, Answer--  worker
pool   --Spawn (with the worker's channel), Kill-->  warden       a note is a packet
pool   <--Ended--  warden
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from async_grpo.errors import WireError
from async_grpo.utils.frames import pack_frame

M = TypeVar("M", bound=msgspec.Struct)

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


def pack(message: msgspec.Struct) -> bytes:
    """The message as a frame. Raises ValueError for one above MAX_FRAME_BYTES."""
    return pack_frame(msgspec.msgpack.encode(message), MAX_FRAME_BYTES)


def unpack(payload: bytes, kind: type[M]) -> M:
    """The message in the payload of a frame. Raises WireError if it is not of that kind."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.MsgspecError as error:
        raise WireError(f"a frame is not a {kind.__name__}: {error}") from error
