"""Faults between a publisher process and receiver processes. What every transport promises: tests/contract."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio

from async_grpo.errors import PublisherLost, WaitTimeout, WeightsError
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.node.receiver import SharedWeightReceiver
from async_grpo.weights.zmq.sender import ZmqWeightSender
from async_grpo.wire.board import PublisherAddress
from tests.support.weight_plane import Board, assert_holds, proxy_to, publish, receiving, until, with_


@pytest.fixture
async def receiver(board: Board) -> AsyncIterator[SharedWeightReceiver]:
    async with receiving(board) as receiver:
        yield receiver


async def test_publishing_faster_than_the_network_starves_nobody(publisher: ZmqWeightSender, board: Board) -> None:
    async with proxy_to(publisher, board) as proxy, receiving(board) as receiver:
        proxy.pause_s = 0.01  # a fetch takes half a second at least, a version comes every 50 ms
        version, newest, came = 0, None, 0
        while came < 2:
            publish(publisher, version)
            version += 1
            try:
                newest = await receiver.wait_for_newer_version(newest, 0.05)
                came += 1
            except WaitTimeout:
                assert version < 2000
        assert receiver.stats.skipped > 2


async def test_a_hold_ends_after_the_time_that_an_update_may_take(publisher: ZmqWeightSender, board: Board) -> None:
    async with receiving(board, with_(update_timeout_s=0.5)) as receiver:
        publish(publisher, 0)
        await receiver.wait_for_newer_version(None, 30)
        async with receiver.hold_newest():
            publish(publisher, 1)
            await receiver.wait_for_newer_version((0, 0), 30)
            publish(publisher, 2)
            assert await receiver.wait_for_newer_version((0, 1), 30) == (0, 2)


def test_a_publisher_that_was_killed_is_named_to_the_trainer(publisher: ZmqWeightSender) -> None:
    os.kill(publisher.process_id, signal.SIGKILL)
    with pytest.raises(PublisherLost, match="ended with code -9"):
        publish(publisher, 1)


@pytest.mark.parametrize("fault", ["spoil", "lose"])
async def test_a_spoiled_or_lost_chunk_is_asked_for_again(fault: str, publisher: ZmqWeightSender, board: Board) -> None:
    publish(publisher, 0)
    async with proxy_to(publisher, board) as proxy, receiving(board) as receiver:
        setattr(proxy, fault, 2)
        assert_holds(receiver.store_path, await receiver.wait_for_newer_version(None, 30))
        assert receiver.stats.rerequests >= 2


async def test_a_fetch_that_takes_too_long_is_given_up_and_the_newest_version_fetched_instead(
    publisher: ZmqWeightSender, board: Board
) -> None:
    publish(publisher, 0)
    hasty = with_(update_timeout_s=0.4)
    async with proxy_to(publisher, board) as proxy, receiving(board, hasty) as receiver:
        proxy.lose = 1_000_000
        await until(lambda: receiver.stats.interrupted >= 2)
        with pytest.raises(WaitTimeout, match="which is alive"):
            await receiver.wait_for_newer_version(None, 0.3)
        publish(publisher, 1)
        proxy.lose = 0
        assert_holds(receiver.store_path, await receiver.wait_for_newer_version(WeightVersion(0, 0), 30))


async def test_a_request_too_large_to_be_one_ends_its_connection_and_not_the_publisher(
    publisher: ZmqWeightSender, receiver: SharedWeightReceiver
) -> None:
    with zmq.asyncio.Context.instance().socket(zmq.DEALER) as stranger:
        stranger.connect(publisher.address.requests)
        await stranger.send(b"x" * 100_000)
        publish(publisher, 0)
        assert await receiver.wait_for_newer_version(None, 30) == (0, 0)


async def test_a_relay_that_cannot_be_understood_is_left_for_another_parent(
    publisher: ZmqWeightSender, board: Board
) -> None:
    publish(publisher, 0)
    with zmq.asyncio.Context.instance().socket(zmq.ROUTER) as relay:
        port = relay.bind_to_random_port("tcp://127.0.0.1")
        async with proxy_to(publisher, board) as proxy:
            proxy.impostor = f"tcp://127.0.0.1:{port}"
            async with receiving(board) as receiver:
                peer, _ = await relay.recv_multipart()
                proxy.impostor = ""
                await relay.send_multipart([peer, b"of another release"])
                assert_holds(receiver.store_path, await receiver.wait_for_newer_version(None, 30))
                assert receiver.stats.parents_lost == 1
                assert receiver.restarts == 0


async def test_a_publisher_that_cannot_be_understood_is_named(board: Board) -> None:
    with zmq.asyncio.Context.instance().socket(zmq.ROUTER) as requests:
        endpoint = f"tcp://127.0.0.1:{requests.bind_to_random_port('tcp://127.0.0.1')}"
        board.address = PublisherAddress(epoch=0, announce="tcp://127.0.0.1:1", requests=endpoint)
        async with receiving(board) as receiver:
            peer, _ = await requests.recv_multipart()
            await requests.send_multipart([peer, b"of another release"])
            with pytest.raises(WeightsError, match=f"{endpoint} sent a message that this release cannot read"):
                await receiver.wait_for_newer_version(None, 30)


async def test_a_hold_that_was_given_up_protects_no_version(
    publisher: ZmqWeightSender, receiver: SharedWeightReceiver
) -> None:
    publish(publisher, 0)
    await receiver.wait_for_newer_version(None, 30)
    taking = asyncio.create_task(receiver._acquire_hold())
    await asyncio.sleep(0)  # the Hold is sent, and nobody waits for the answer
    taking.cancel()
    for version in (1, 2, 3):  # the receiver has two slots: a version that is held would keep it from the third
        publish(publisher, version)
        assert await receiver.wait_for_newer_version((0, version - 1), 5) == (0, version)
