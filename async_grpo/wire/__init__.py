"""Records that travel between processes, and their encoding."""

from async_grpo.errors import WireError
from async_grpo.wire.records import (
    FORMAT,
    Batch,
    Group,
    Partial,
    ReleaseReason,
    Sample,
    Task,
    Ticket,
    Turn,
    VersionSpan,
    decode,
    encode,
    logprobs_to_bytes,
    tokens_to_bytes,
)

__all__ = [
    "FORMAT",
    "Batch",
    "Group",
    "Partial",
    "ReleaseReason",
    "Sample",
    "Task",
    "Ticket",
    "Turn",
    "VersionSpan",
    "WireError",
    "decode",
    "encode",
    "logprobs_to_bytes",
    "tokens_to_bytes",
]
