"""Encryption: the same secret works, another one or none gets nothing and is noticed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
import zmq
import zmq.asyncio

from async_grpo.errors import PublisherLost, WaitTimeout
from async_grpo.weights.zmq.messages import ChunkRequest, ManifestRequest
from async_grpo.weights.zmq.sender import ZmqWeightSender
from async_grpo.weights.zmq.sockets import SECRET_VARIABLE
from async_grpo.wire import encode
from tests.support.weight_plane import LAYOUT, RUN, Board, assert_holds, proxy_to, publish, receiving, until, with_

SECRET = "a secret of more than sixteen characters"


@pytest.fixture(params=["control", "all"])
def encrypt(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def publisher(board: Board, encrypt: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ZmqWeightSender]:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    with ZmqWeightSender(LAYOUT, RUN, 0, with_(encrypt=encrypt, fanout=1)) as publisher:
        board.address = publisher.address
        publish(publisher, 0)
        yield publisher


async def test_with_the_secret_every_byte_arrives_also_through_a_relay(
    publisher: ZmqWeightSender, board: Board, encrypt: str
) -> None:
    config = with_(encrypt=encrypt, fanout=1)
    async with receiving(board, config, store="a") as first, receiving(board, config, store="b") as second:
        for receiver in (first, second):
            assert_holds(receiver.store_path, await receiver.wait_for_newer_version(None, 30))
        await until(lambda: publisher.fetch_stats().receivers == 2)
        publish(publisher, 1)
        for receiver in (first, second):
            assert_holds(receiver.store_path, await receiver.wait_for_newer_version((0, 0), 30))
        await until(lambda: max(first.stats.relayed_bytes, second.stats.relayed_bytes) > 0)
        assert publisher.fetch_stats().refused == 0


@pytest.mark.parametrize("theirs", ["another secret, also long enough", None])
async def test_a_receiver_with_another_secret_or_none_gets_nothing_and_is_counted(
    theirs: str | None, publisher: ZmqWeightSender, board: Board, encrypt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if theirs is not None:
        monkeypatch.setenv(SECRET_VARIABLE, theirs)
    async with receiving(board, with_(encrypt="off" if theirs is None else encrypt)) as stranger:
        await until(lambda: publisher.fetch_stats().refused > 0)
        with pytest.raises((PublisherLost, WaitTimeout)):
            await stranger.wait_for_newer_version(None, 1.0)
        assert stranger.stats.received_bytes == 0
        assert (publisher.fetch_stats().receivers, publisher.fetch_stats().served_bytes) == (0, 0)


async def test_a_plain_peer_hears_no_announcement_and_gets_no_manifest(publisher: ZmqWeightSender) -> None:
    context = zmq.asyncio.Context.instance()
    with context.socket(zmq.SUB) as announcements, context.socket(zmq.DEALER) as requests:
        announcements.setsockopt(zmq.SUBSCRIBE, b"")
        announcements.connect(publisher.address.announce)
        requests.connect(publisher.address.requests)
        with contextlib.suppress(zmq.Again):  # libzmq may have dropped the peer that failed its handshake
            await requests.send(encode(ManifestRequest()), zmq.DONTWAIT)
        await asyncio.sleep(1.0)
        assert not await announcements.poll(0)
        assert not await requests.poll(0)


async def test_chunks_in_the_clear_are_given_only_to_who_knows_the_key_of_the_version(board: Board) -> None:
    """Without encryption of chunks, a peer that can reach the port but read no manifest gets none."""
    with ZmqWeightSender(LAYOUT, RUN, 0, with_()) as publisher:
        publish(publisher, 0)
        async with proxy_to(publisher, board) as proxy, receiving(board) as receiver:
            await receiver.wait_for_newer_version(None, 30)
            with zmq.asyncio.Context.instance().socket(zmq.DEALER) as stranger:
                stranger.connect(proxy._publisher_chunks)
                for signature in (b"", b"0" * 16):
                    request = ChunkRequest(epoch=0, version=0, index=0, patch=False, signature=signature)
                    await stranger.send(encode(request))
                await until(lambda: publisher.fetch_stats().unsigned == 2)
                assert not await stranger.poll(100)
