"""Messages of the reward pool: frames between a slot and its worker, packets between the pool and its supervisor.

slot --VerifierRequest--> worker                                4 bytes of length, then MessagePack,
slot <--WorkerReady, then Outcome or ExtractedAnswer-- worker   on a private stream socket

pool --SpawnWorker (with the worker's end of that stream), KillWorker--> supervisor    one message per packet
pool <--WorkerExited-- supervisor
"""

from __future__ import annotations

from typing import Any

import msgspec

from async_grpo.errors import WireError
from async_grpo.rewards.base import RewardInput
from async_grpo.utils.frames import pack_frame

MAX_FRAME_BYTES = 256 << 20
MAX_REPLY_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 64 << 10


class WorkerReady(msgspec.Struct, frozen=True):
    """Sent by a worker when it has loaded its verifiers."""

    broken: dict[str, str] = {}
    """Reasons by name of the verifiers that could not be loaded."""
    extracting: list[str] = []
    """Names of the verifiers that can extract the answer from a completion."""


class VerifierRequest(msgspec.Struct, frozen=True):
    """One completion for the verifiers `names`, in this order. Each of them sends one reply.

    The replies are Outcomes, or with `extract` ExtractedAnswers.
    """

    names: list[str]
    item: RewardInput
    extract: bool = False


class SpawnWorker(msgspec.Struct, frozen=True, tag="spawn"):
    """Command: start a worker. The packet carries the descriptor of its channel."""

    worker: int


class KillWorker(msgspec.Struct, frozen=True, tag="kill"):
    """Command: kill a worker and all its descendants."""

    worker: int


class WorkerExited(msgspec.Struct, frozen=True, tag="ended"):
    """Report: a worker has exited, and all its descendants are gone."""

    worker: int
    code: int
    """Exit code, or minus the number of the signal that killed it."""
    cause: str = ""
    """Empty (exited by itself), "killed" (by KillWorker), "memory" (killed above its memory limit), or "lost" (the
    supervisor has died)."""
    output: str = ""
    """End of its output."""


def pack(message: object) -> bytes:
    """Encode a message as a frame. Raises ValueError if it is larger than MAX_FRAME_BYTES."""
    return pack_frame(msgspec.msgpack.encode(message), MAX_FRAME_BYTES)


def unpack(payload: bytes, kind: Any) -> Any:
    """Decode the payload of a frame. Raises WireError if it is not of type `kind`."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.MsgspecError as error:
        raise WireError(f"a frame is not a {getattr(kind, '__name__', kind)}: {error}") from error
