"""Length-prefixed frames: there and back, in pieces, and what is refused."""

from __future__ import annotations

import asyncio
import io

import pytest

from async_grpo.errors import WireError
from async_grpo.rewards.base import Outcome, RewardFailure, RewardInput
from async_grpo.rewards.workers.messages import VerifierRequest, pack, unpack
from async_grpo.utils.frames import LENGTH, FrameReader, pack_frame, read_frame, take_frame

LIMIT = 1000
FIRST, SECOND = b"first", b""
FRAMES = pack_frame(FIRST, LIMIT) + pack_frame(SECOND, LIMIT)
TOO_LONG = LENGTH.pack(LIMIT + 1)


def reader_of(*pieces: bytes) -> FrameReader:
    stream = asyncio.StreamReader()
    stream.feed_data(b"".join(pieces))
    stream.feed_eof()
    return FrameReader(stream, LIMIT)


async def test_frames_come_back_in_order() -> None:
    reader = reader_of(FRAMES)
    assert [await reader.next(), await reader.next()] == [FIRST, SECOND]
    with pytest.raises(asyncio.IncompleteReadError):
        await reader.next()


@pytest.mark.parametrize("there", [0, 2, 4, 6])
async def test_a_cancelled_read_loses_nothing(there: int) -> None:
    stream = asyncio.StreamReader()
    reader = FrameReader(stream, LIMIT)
    stream.feed_data(FRAMES[:there])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await reader.next()
    stream.feed_data(FRAMES[there:])
    assert [await reader.next(), await reader.next()] == [FIRST, SECOND]


def test_a_blocking_stream_is_read_to_its_end() -> None:
    stream = io.BytesIO(FRAMES + FRAMES[:3])
    assert [read_frame(stream, LIMIT) for _ in range(3)] == [FIRST, SECOND, None]


def test_whole_frames_are_taken_from_what_was_received() -> None:
    received, taken = bytearray(), []
    for byte in FRAMES:
        received.append(byte)
        if (payload := take_frame(received, LIMIT)) is not None:
            taken.append(payload)
    assert (taken, received) == ([FIRST, SECOND], b"")


async def test_a_length_above_the_limit_is_refused_before_anything_is_read() -> None:
    with pytest.raises(WireError, match="1001 bytes"):
        await reader_of(TOO_LONG).next()
    with pytest.raises(WireError, match="1001 bytes"):
        read_frame(io.BytesIO(TOO_LONG), LIMIT)
    with pytest.raises(WireError, match="1001 bytes"):
        take_frame(bytearray(TOO_LONG), LIMIT)
    with pytest.raises(ValueError, match="1001 bytes"):
        pack_frame(bytes(LIMIT + 1), LIMIT)


async def test_messages_of_the_verifiers_travel_in_frames() -> None:
    request = VerifierRequest(["a", "b"], RewardInput("completion", "answer", "prompt", {"key": "value"}, 2))
    assert unpack(await reader_of(pack(request)).next(), VerifierRequest) == request
    for outcome in (0.5, RewardFailure("raised", "ValueError: no")):
        assert unpack(await reader_of(pack(outcome)).next(), Outcome) == outcome
    for stray in (b"no", b"", pack("1.0")[4:], pack(None)[4:]):
        with pytest.raises(WireError, match="RewardFailure"):
            unpack(stray, Outcome)
