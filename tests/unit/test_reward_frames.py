"""Frames of the workers' channels: there and back, and what is refused."""

from __future__ import annotations

import asyncio
import io
import struct

import pytest

from async_grpo.errors import WireError
from async_grpo.rewards.workers.messages import (
    MAX_FRAME_BYTES,
    FrameReader,
    VerifierReply,
    VerifierRequest,
    pack,
    read_frame_blocking,
)

FIRST, SECOND = VerifierReply(score=1.0), VerifierReply(kind="raised", reason="no")


def reader_of(*pieces: bytes) -> FrameReader:
    stream = asyncio.StreamReader()
    stream.feed_data(b"".join(pieces))
    stream.feed_eof()
    return FrameReader(stream, max_bytes=1000)


async def test_messages_come_back_in_order() -> None:
    reader = reader_of(pack(FIRST), pack(SECOND))
    assert [await reader.next(VerifierReply), await reader.next(VerifierReply)] == [FIRST, SECOND]
    with pytest.raises(asyncio.IncompleteReadError):
        await reader.next(VerifierReply)


@pytest.mark.parametrize("there", [0, 2, 4, 6])
async def test_waiting_that_is_cut_short_loses_nothing(there: int) -> None:
    stream, frame = asyncio.StreamReader(), pack(FIRST)
    reader = FrameReader(stream)
    stream.feed_data(frame[:there])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await reader.next(VerifierReply)
    stream.feed_data(frame[there:] + pack(SECOND))
    assert [await reader.next(VerifierReply), await reader.next(VerifierReply)] == [FIRST, SECOND]


def test_an_assignment_comes_through_a_blocking_stream() -> None:
    assignment = VerifierRequest(["a", "b"], "completion", "answer", "prompt", {"key": "value"})
    stream = io.BytesIO(pack(assignment))
    assert read_frame_blocking(stream, VerifierRequest) == assignment
    assert read_frame_blocking(stream, VerifierRequest) is None


async def test_a_length_above_the_limit_is_refused_before_anything_is_read() -> None:
    with pytest.raises(WireError, match="claims 1001 bytes"):
        await reader_of(struct.pack(">I", 1001)).next(VerifierReply)
    with pytest.raises(WireError, match=f"claims {MAX_FRAME_BYTES + 1} bytes"):
        read_frame_blocking(io.BytesIO(struct.pack(">I", MAX_FRAME_BYTES + 1)), VerifierRequest)


async def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(WireError, match="not a VerifierReply"):
        await reader_of(struct.pack(">I", 2), b"no").next(VerifierReply)
