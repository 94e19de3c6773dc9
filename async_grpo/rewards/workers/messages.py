"""Messages of the reward pool: frames between a slot and its worker, packets between the pool and its supervisor.

slot --VerifierRequest--> worker              4 bytes of length, then MessagePack,
slot <--WorkerReady, VerifierReply-- worker   on a stream that only the two hold

pool --SpawnWorker (with the worker's end of that stream), KillWorker--> supervisor    one message a packet
pool <--WorkerExited-- supervisor
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from async_grpo.errors import WireError
from async_grpo.utils.frames import pack_frame

M = TypeVar("M", bound=msgspec.Struct)

MAX_FRAME_BYTES = 256 << 20
MAX_REPLY_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 64 << 10


class WorkerReady(msgspec.Struct, frozen=True):
    """A worker has loaded its verifiers. `broken`: those that it could not load, by name, and why."""

    broken: dict[str, str] = {}
    extracting: list[str] = []
    """Names of the verifiers that can extract the answer from a completion."""


class VerifierRequest(msgspec.Struct, frozen=True):
    """One completion for the verifiers `names`, in this order: to judge, or to extract its answer with `extract`."""

    names: list[str]
    completion: str
    answer: str
    prompt: str = ""
    metadata: dict[str, str] = {}
    tool_calls: int = 0
    extract: bool = False


class VerifierReply(msgspec.Struct, frozen=True):
    """What one verifier returned: a score, or the kind of failure (a FailureKind; "" for none) and its reason.

    After an extraction, `text` holds the answer instead of a score; None if the completion gives no answer.
    """

    score: float | None = None
    kind: str = ""
    reason: str = ""
    text: str | None = None


class SpawnWorker(msgspec.Struct, frozen=True, tag="spawn"):
    """Command: start a worker. The descriptor of its channel comes with the packet."""

    worker: int


class KillWorker(msgspec.Struct, frozen=True, tag="kill"):
    """Command: kill a worker and everything that it started."""

    worker: int


class WorkerExited(msgspec.Struct, frozen=True, tag="ended"):
    """A worker has exited, and everything that it started is gone.

    code: its exit code, or minus the signal. cause: "" (it exited by itself), "killed" (by KillWorker), "memory" (the
    supervisor killed it above its memory limit), "lost" (the supervisor itself has died). output: the end of what it
    printed.
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
