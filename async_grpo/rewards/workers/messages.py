"""Messages of the reward pool: frames between a slot and its worker, packets between the pool and its supervisor.

slot --VerifierRequest--> worker                                4 bytes of length, then MessagePack,
slot <--WorkerReady, then Outcome or ExtractedAnswer-- worker   on a private stream

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
    """A worker has loaded its verifiers. `broken`: those that it could not load, by name, and why."""

    broken: dict[str, str] = {}
    extracting: list[str] = []
    """Names of the verifiers that can extract the answer from a completion."""


class VerifierRequest(msgspec.Struct, frozen=True):
    """One completion for the verifiers `names`, in this order: to judge, or to extract its answer with `extract`.

    Each verifier gives one reply: an Outcome, or an ExtractedAnswer.
    """

    names: list[str]
    item: RewardInput
    extract: bool = False


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


def pack(message: object) -> bytes:
    """The message as a frame. Raises ValueError for one above MAX_FRAME_BYTES."""
    return pack_frame(msgspec.msgpack.encode(message), MAX_FRAME_BYTES)


def unpack(payload: bytes, kind: Any) -> Any:
    """The message of this type in the payload of a frame. Raises WireError if it is not of that type."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.MsgspecError as error:
        raise WireError(f"a frame is not a {getattr(kind, '__name__', kind)}: {error}") from error
