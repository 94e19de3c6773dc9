"""Frames of the verifiers' pipes: there and back, and what is refused."""

from __future__ import annotations

import asyncio
import io
import struct

import pytest

from async_grpo.errors import WireError
from async_grpo.rewards.frames import MAX_FRAME_BYTES, Assignment, Score, pack, read_frame, read_frame_blocking


def stream_of(*pieces: bytes) -> asyncio.StreamReader:
    stream = asyncio.StreamReader()
    stream.feed_data(b"".join(pieces))
    stream.feed_eof()
    return stream


async def test_messages_come_back_in_order() -> None:
    first, second = Score(scores={"a": 1.0}), Score(scores={}, error="no")
    stream = stream_of(pack(first), pack(second))
    assert [await read_frame(stream, Score), await read_frame(stream, Score)] == [first, second]


async def test_a_length_above_the_limit_is_refused_before_anything_is_read() -> None:
    head = struct.pack(">I", MAX_FRAME_BYTES + 1)
    with pytest.raises(WireError, match=rf"claims {MAX_FRAME_BYTES + 1} bytes"):
        await read_frame(stream_of(head), Score)
    with pytest.raises(WireError, match="claims"):
        read_frame_blocking(io.BytesIO(head), Assignment)


async def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(WireError, match="not a Score"):
        await read_frame(stream_of(struct.pack(">I", 2), b"no"), Score)
