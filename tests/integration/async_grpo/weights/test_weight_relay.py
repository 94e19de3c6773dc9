"""Receivers that pass chunks on: the publisher's egress stays that of `fanout` copies, and the tree heals."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack

import psutil
import pytest

from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.node.receiver import SharedWeightReceiver
from async_grpo.weights.zmq.sender import ZmqWeightSender
from tests.support.weight_plane import (
    LAYOUT,
    RUN,
    Board,
    assert_holds,
    proxy_to,
    publish,
    random_weights,
    receiving,
    step,
    until,
    with_,
)


async def join_all(
    stack: AsyncExitStack, board: Board, publisher: ZmqWeightSender, count: int, **changes: object
) -> list[SharedWeightReceiver]:
    """Receivers of as many machines, which join one after the other."""
    receivers: list[SharedWeightReceiver] = []
    for number in range(count):
        config = with_(**changes)
        receivers.append(await stack.enter_async_context(receiving(board, config, store=f"node-{number}")))
        await until(lambda: publisher.fetch_stats().receivers == len(receivers))
    return receivers


def process_of(receiver: SharedWeightReceiver) -> psutil.Process:
    assert receiver.process_id is not None
    return psutil.Process(receiver.process_id)


@pytest.mark.parametrize(("fanout", "copies"), [(2, 2), pytest.param(1, 1, marks=pytest.mark.slow), (0, 4)])
async def test_the_publisher_sends_fanout_copies_dense_and_delta(fanout: int, copies: int, board: Board) -> None:
    with ZmqWeightSender(LAYOUT, RUN, 0, with_(fanout=fanout)) as publisher:
        board.address = publisher.address
        async with AsyncExitStack() as stack:
            receivers = await join_all(stack, board, publisher, 4, fanout=fanout)
            weights = random_weights(0)
            for version in range(3):
                publisher.publish_weights(version, weights.items())
                for receiver in receivers:
                    assert await receiver.wait_for_newer_version(WeightVersion(0, version - 1), 30) == (0, version)
                    assert_holds(receiver.store_path, WeightVersion(0, version), weights)
                weights = step(weights, version)
            stats = publisher.fetch_stats()
            assert stats.served_bytes == copies * stats.encoded_bytes
            assert stats.delta_versions == 2
            assert stats.direct_receivers == copies
            assert all(receiver.stats.patched_chunks > 0 for receiver in receivers)
            await until(lambda: sum(r.stats.relayed_bytes for r in receivers) == (4 - copies) * stats.encoded_bytes)


async def test_chunks_are_passed_on_before_the_version_is_whole(board: Board) -> None:
    with ZmqWeightSender(LAYOUT, RUN, 0, with_(fanout=1)) as publisher:
        async with proxy_to(publisher, board) as proxy, AsyncExitStack() as stack:
            receivers = await join_all(stack, board, publisher, 2)
            proxy.pause_s = 0.02
            publish(publisher, 0)
            await until(lambda: any(r.stats.relayed_bytes > 0 for r in receivers))
            assert all(r.stats.versions == 0 for r in receivers)
            for receiver in receivers:
                assert_holds(receiver.store_path, await receiver.wait_for_newer_version(None, 30))
            assert proxy.chunks == publisher.fetch_stats().served_chunks


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
async def test_a_relay_that_dies_or_hangs_amid_a_transfer_is_replaced_and_no_chunk_is_fetched_twice(
    number: signal.Signals, board: Board
) -> None:
    with ZmqWeightSender(LAYOUT, RUN, 0, with_(fanout=1)) as publisher:
        async with proxy_to(publisher, board) as proxy, AsyncExitStack() as stack:
            receivers = await join_all(stack, board, publisher, 3)
            proxy.pause_s = 0.02
            publish(publisher, 0)
            await until(lambda: any(r.stats.relayed_bytes > 10 * 8192 for r in receivers))
            relay, *others = receivers  # the first of the chain
            process = process_of(relay)
            os.kill(process.pid, number)
            proxy.pause_s = 0.0
            try:
                for receiver in others:
                    assert_holds(receiver.store_path, await receiver.wait_for_newer_version(None, 30))
                assert others[0].stats.parents_lost > 0
                for receiver in others:
                    assert receiver.stats.received_bytes == LAYOUT.total_bytes
            finally:
                os.kill(process.pid, signal.SIGCONT) if number == signal.SIGSTOP else None
            assert_holds(relay.store_path, await relay.wait_for_newer_version(None, 30))


async def test_a_relay_that_left_is_not_waited_for(board: Board) -> None:
    with ZmqWeightSender(LAYOUT, RUN, 0, with_(fanout=1)) as publisher:
        board.address = publisher.address
        async with AsyncExitStack() as stack:
            receivers = await join_all(stack, board, publisher, 3)
            publish(publisher, 0)
            for receiver in receivers:
                await receiver.wait_for_newer_version(None, 30)
            await receivers[0].close()
            await until(lambda: publisher.fetch_stats().receivers == 2)
            publish(publisher, 1)
            for receiver in receivers[1:]:
                assert_holds(receiver.store_path, await receiver.wait_for_newer_version((0, 0), 30))


async def test_a_burst_reaches_the_end_of_a_chain(board: Board) -> None:
    with ZmqWeightSender(LAYOUT, RUN, 0, with_(fanout=1)) as publisher:
        board.address = publisher.address
        async with AsyncExitStack() as stack:
            receivers = await join_all(stack, board, publisher, 3)
            for version in range(20):
                publish(publisher, version)
                await asyncio.sleep(0.02)
            for receiver in receivers:
                seen = None
                while seen != (0, 19):
                    seen = await receiver.wait_for_newer_version(seen, 30)
                assert_holds(receiver.store_path, WeightVersion(0, 19))
