"""Weights from a publisher process to receiver processes over real ZMQ."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import numpy as np
import psutil
import pytest
import zmq
import zmq.asyncio

from async_grpo.errors import PublisherLost, WaitTimeout, WeightsCorrupt, WeightsError
from async_grpo.weights.manifest import WeightVersion, layout_of
from async_grpo.weights.shared_memory import remove_stores
from async_grpo.weights.store import WeightStore
from async_grpo.weights.zmq.receiver import ZmqWeightReceiver
from async_grpo.weights.zmq.sender import ZmqWeightSender
from tests.support.weight_plane import (
    CONFIG,
    LAYOUT,
    RUN,
    Board,
    assert_holds,
    proxy_to,
    publish,
    random_weights,
    receiving,
    until,
    with_,
)


@pytest.fixture
async def receiver(board: Board) -> AsyncIterator[ZmqWeightReceiver]:
    async with receiving(board) as receiver:
        yield receiver


async def test_every_byte_arrives(publisher: ZmqWeightSender, receiver: ZmqWeightReceiver) -> None:
    publish(publisher, 0)
    identity = await receiver.next_version(None, 30)
    assert identity == (0, 0)
    assert_holds(receiver.store_path, identity)
    assert receiver.stats.versions == 1
    assert receiver.stats.received_bytes == LAYOUT.total_bytes


async def test_one_version_after_another(publisher: ZmqWeightSender, receiver: ZmqWeightReceiver) -> None:
    seen = None
    for version in range(4):
        publish(publisher, version)
        seen = await receiver.next_version(seen, 30)
        assert seen == (0, version)
        assert_holds(receiver.store_path, seen)


async def test_a_late_joiner_gets_the_newest_version_only(publisher: ZmqWeightSender, board: Board) -> None:
    for version in range(3):
        publish(publisher, version)
    await asyncio.sleep(0.2)
    async with receiving(board) as late:
        assert await late.next_version(None, 30) == (0, 2)
        assert late.stats.versions == 1


async def test_versions_published_in_a_burst_are_skipped_and_the_last_one_arrives_whole(
    publisher: ZmqWeightSender, receiver: ZmqWeightReceiver
) -> None:
    for version in range(30):
        publish(publisher, version)
        await asyncio.sleep(0)
    identity = None
    while identity != (0, 29):
        identity = await receiver.next_version(identity, 30)
        async with receiver.hold() as held:
            assert_holds(receiver.store_path, held.identity)
    assert receiver.stats.versions + receiver.stats.skipped <= 30


async def test_publishing_faster_than_the_network_starves_nobody(publisher: ZmqWeightSender, board: Board) -> None:
    async with proxy_to(publisher, board) as proxy, receiving(board) as receiver:
        proxy.pause_s = 0.01  # a fetch takes half a second at least, a version comes every 50 ms
        version, newest, came = 0, None, 0
        while came < 2:
            publish(publisher, version)
            version += 1
            try:
                newest = await receiver.next_version(newest, 0.05)
                came += 1
            except WaitTimeout:
                assert version < 2000
        assert receiver.stats.skipped > 2


async def test_what_is_held_is_not_touched_however_many_versions_come(
    publisher: ZmqWeightSender, receiver: ZmqWeightReceiver
) -> None:
    publish(publisher, 0)
    await receiver.next_version(None, 30)
    async with receiver.hold() as held:
        snapshot = WeightStore.open(receiver.store_path).snapshot(held.identity)
        publish(publisher, 1)
        await receiver.next_version(held.identity, 30)  # into the other slot
        publish(publisher, 2)
        with pytest.raises(WaitTimeout):
            await receiver.next_version((0, 1), 0.5)
        snapshot.verify()
    assert await receiver.next_version((0, 1), 30) == (0, 2)
    with pytest.raises(WeightsCorrupt, match="overwritten"):
        snapshot.verify()


async def test_a_hold_ends_after_the_time_that_an_update_may_take(publisher: ZmqWeightSender, board: Board) -> None:
    async with receiving(board, with_(update_timeout_s=0.5)) as receiver:
        publish(publisher, 0)
        await receiver.next_version(None, 30)
        async with receiver.hold():
            publish(publisher, 1)
            await receiver.next_version((0, 0), 30)
            publish(publisher, 2)
            assert await receiver.next_version((0, 1), 30) == (0, 2)


async def test_a_restarted_trainer_is_found_on_other_ports_and_its_lower_version_is_newer(
    publisher: ZmqWeightSender, receiver: ZmqWeightReceiver, board: Board
) -> None:
    publish(publisher, 5)
    before = await receiver.next_version(None, 30)
    os.kill(publisher.process_id, signal.SIGKILL)
    with ZmqWeightSender(LAYOUT, RUN, 1, CONFIG) as restarted:
        publish(restarted, 4)
        board.address = restarted.address
        assert await receiver.next_version(before, 30) == (1, 4)
        assert_holds(receiver.store_path, WeightVersion(1, 4))


async def test_a_trainer_of_an_older_epoch_is_refused(receiver: ZmqWeightReceiver, board: Board) -> None:
    with ZmqWeightSender(LAYOUT, RUN, 1, CONFIG) as newer:
        publish(newer, 3)
        board.address = newer.address
        seen = await receiver.next_version(None, 30)
        with ZmqWeightSender(LAYOUT, f"{RUN}-older", 0, CONFIG) as older:
            publish(older, 9)
            board.address = older.address
            with pytest.raises(WaitTimeout, match="newer than version 3 of epoch 1"):
                await receiver.next_version(seen, 3.0)
    remove_stores(f"{RUN}-older")


async def test_waiting_for_a_trainer_that_never_came_says_so(receiver: ZmqWeightReceiver) -> None:
    with pytest.raises(WaitTimeout, match="first weights from a trainer that has not announced itself"):
        await receiver.next_version(None, 0.3)


async def test_a_dead_publisher_is_named(publisher: ZmqWeightSender, receiver: ZmqWeightReceiver) -> None:
    publish(publisher, 0)
    seen = await receiver.next_version(None, 30)
    with pytest.raises(WaitTimeout, match="which is alive"):
        await receiver.next_version(seen, 0.3)
    os.kill(publisher.process_id, signal.SIGKILL)
    with pytest.raises(PublisherLost, match=r"publisher of epoch 0 .* silent"):
        await receiver.next_version(seen, 5.0)
    with pytest.raises(PublisherLost, match="ended with code -9"):
        publish(publisher, 1)


async def test_weights_that_do_not_fit_the_layout_are_refused_and_the_next_ones_are_not(
    publisher: ZmqWeightSender, receiver: ZmqWeightReceiver
) -> None:
    given = random_weights(0)
    with pytest.raises(WeightsError, match=r"4 tensors .* not given: \['experts', 'frozen', 'head'\]"):
        publisher.publish(0, [("embed", given["embed"])])
    with pytest.raises(WeightsError, match=r"'norm' is float32 .* float64"):
        publisher.publish(0, [("norm", np.zeros(77))])
    publish(publisher, 1)
    with pytest.raises(WeightsError, match="versions only rise"):
        publish(publisher, 1)
    assert_holds(receiver.store_path, await receiver.next_version(None, 30))


async def test_closing_ends_the_processes_and_removes_the_stores(publisher: ZmqWeightSender, board: Board) -> None:
    async with receiving(board) as receiver:
        publish(publisher, 0)
        await receiver.next_version(None, 30)
        assert receiver.process_id is not None
    assert not psutil.pid_exists(receiver.process_id)
    assert not receiver.store_path.exists()
    publisher.close()
    assert not psutil.pid_exists(publisher.process_id)
    assert not publisher.store.exists()


@pytest.mark.parametrize("fault", ["spoil", "lose"])
async def test_a_spoiled_or_lost_chunk_is_asked_for_again(fault: str, publisher: ZmqWeightSender, board: Board) -> None:
    publish(publisher, 0)
    async with proxy_to(publisher, board) as proxy, receiving(board) as receiver:
        setattr(proxy, fault, 2)
        assert_holds(receiver.store_path, await receiver.next_version(None, 30))
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
            await receiver.next_version(None, 0.3)
        publish(publisher, 1)
        proxy.lose = 0
        assert_holds(receiver.store_path, await receiver.next_version(WeightVersion(0, 0), 30))


async def test_a_request_too_large_to_be_one_ends_its_connection_and_not_the_publisher(
    publisher: ZmqWeightSender, receiver: ZmqWeightReceiver
) -> None:
    with zmq.asyncio.Context.instance().socket(zmq.DEALER) as stranger:
        stranger.connect(publisher.address.requests)
        await stranger.send(b"x" * 100_000)
        publish(publisher, 0)
        assert await receiver.next_version(None, 30) == (0, 0)


async def test_a_chunk_that_stays_corrupt_is_refused_and_nothing_is_applied(
    publisher: ZmqWeightSender, board: Board
) -> None:
    publish(publisher, 0)
    async with proxy_to(publisher, board) as proxy, receiving(board) as receiver:
        proxy.spoil = 1_000_000
        with pytest.raises(WeightsCorrupt, match="failed its hash"):
            await receiver.next_version(None, 30)


async def test_another_model_is_refused(publisher: ZmqWeightSender, receiver: ZmqWeightReceiver, board: Board) -> None:
    publish(publisher, 0)
    seen = await receiver.next_version(None, 30)
    other = layout_of([("embed", "float32", [10])])
    with ZmqWeightSender(other, f"{RUN}-other", 1, CONFIG) as stranger:
        stranger.publish(0, [("embed", np.zeros(10, np.float32))])
        board.address = stranger.address
        with pytest.raises(WeightsCorrupt, match="not those that this receiver started with"):
            await receiver.next_version(seen, 30)
    remove_stores(f"{RUN}-other")
