"""Weights from a publisher process to receivers over real ZMQ."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import zmq
import zmq.asyncio

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import PublisherLost, WaitTimeout, WeightsCorrupt, WeightsError
from async_grpo.weights.client import WeightPublisher
from async_grpo.weights.manifest import Identity, layout_of
from async_grpo.weights.receiver import WeightReceiver
from async_grpo.weights.store import WeightStore, remove_stores, store_path
from async_grpo.wire.board import PublisherAddress

RUN = "test-weight-plane"
LAYOUT = layout_of([("embed", "float32", [300, 50]), ("norm", "bfloat16", [77]), ("head", "float32", [50, 300])])
CONFIG = WeightsConfig(chunk_bytes=10_000, heartbeat_s=0.1, request_timeout_s=0.5)


@pytest.fixture(autouse=True)
def _no_stores_are_left() -> Iterator[None]:
    yield
    remove_stores(RUN)


class Board:
    """Stands for the run board: where the publisher listens."""

    address: PublisherAddress | None = None

    async def publisher(self) -> PublisherAddress | None:
        return self.address


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
async def receiver(board: Board) -> AsyncIterator[WeightReceiver]:
    receiver = WeightReceiver(board.publisher, store_path(RUN, "receiver"), CONFIG)
    yield receiver
    await receiver.close()


@pytest.fixture
def publisher(board: Board) -> Iterator[WeightPublisher]:
    with WeightPublisher(LAYOUT, RUN, 0, CONFIG) as publisher:
        board.address = publisher.address
        yield publisher


def weights(seed: int) -> dict[str, npt.NDArray[np.generic]]:
    random = np.random.default_rng(seed)
    return {
        "embed": random.standard_normal((300, 50), np.float32),
        "norm": random.integers(0, 1 << 16, 77, np.uint16),
        "head": random.standard_normal((50, 300), np.float32),
    }


def publish(publisher: WeightPublisher, version: int) -> None:
    publisher.publish(version, weights(version).items())


def assert_holds(path: Path, identity: Identity) -> None:
    snapshot = WeightStore.open(path).snapshot(identity)
    for name, array in weights(identity.version).items():
        assert snapshot.view(name).tobytes() == array.tobytes()
    snapshot.verify()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_every_byte_arrives(publisher: WeightPublisher, receiver: WeightReceiver) -> None:
    publish(publisher, 0)
    identity = await receiver.next_version(None, 10)
    assert identity == (0, 0)
    assert_holds(receiver.store_path, identity)
    assert receiver.stats.versions == 1
    assert receiver.stats.received_bytes == LAYOUT.total_bytes


async def test_one_version_after_another(publisher: WeightPublisher, receiver: WeightReceiver) -> None:
    seen = None
    for version in range(4):
        publish(publisher, version)
        seen = await receiver.next_version(seen, 10)
        assert seen == (0, version)
        assert_holds(receiver.store_path, seen)


async def test_a_late_joiner_gets_the_newest_version_only(publisher: WeightPublisher, board: Board) -> None:
    for version in range(3):
        publish(publisher, version)
    late = WeightReceiver(board.publisher, store_path(RUN, "late"), CONFIG)
    assert await late.next_version(None, 10) == (0, 2)
    assert late.stats.versions == 1
    await late.close()


async def test_versions_published_in_a_burst_are_skipped_and_the_last_one_arrives_whole(
    publisher: WeightPublisher, receiver: WeightReceiver
) -> None:
    for version in range(50):
        publish(publisher, version)
        await asyncio.sleep(0)
    identity = None
    while identity != (0, 49):
        identity = await receiver.next_version(identity, 10)
        assert_holds(receiver.store_path, identity)


async def test_what_was_handed_out_is_not_touched_until_the_next_call(
    publisher: WeightPublisher, receiver: WeightReceiver
) -> None:
    publish(publisher, 0)
    identity = await receiver.next_version(None, 10)
    snapshot = WeightStore.open(receiver.store_path).snapshot(identity)
    for version in (1, 2, 3):
        publish(publisher, version)
        await until(lambda: receiver.stats.versions == version + 1)  # noqa: B023
    snapshot.verify()
    assert await receiver.next_version(identity, 10) == (0, 3)


async def test_a_restarted_trainer_is_found_on_other_ports_and_its_lower_version_is_newer(
    publisher: WeightPublisher, receiver: WeightReceiver, board: Board
) -> None:
    publish(publisher, 5)
    before = await receiver.next_version(None, 10)
    os.kill(publisher.process_id, signal.SIGKILL)
    with WeightPublisher(LAYOUT, RUN, 1, CONFIG) as restarted:
        publish(restarted, 4)
        board.address = restarted.address
        assert await receiver.next_version(before, 10) == (1, 4)
        assert_holds(receiver.store_path, Identity(1, 4))


async def test_a_trainer_of_an_older_epoch_is_refused(receiver: WeightReceiver, board: Board) -> None:
    with WeightPublisher(LAYOUT, RUN, 1, CONFIG) as newer:
        publish(newer, 3)
        board.address = newer.address
        seen = await receiver.next_version(None, 10)
        with WeightPublisher(LAYOUT, f"{RUN}-older", 0, CONFIG) as older:
            publish(older, 9)
            board.address = older.address
            with pytest.raises(WaitTimeout, match="newer than version 3 of epoch 1"):
                await receiver.next_version(seen, 1.5)
    remove_stores(f"{RUN}-older")


async def test_waiting_for_a_trainer_that_never_came_says_so(receiver: WeightReceiver) -> None:
    with pytest.raises(WaitTimeout, match="first weights from a trainer that has not announced itself"):
        await receiver.next_version(None, 0.3)


async def test_a_dead_publisher_is_named(publisher: WeightPublisher, receiver: WeightReceiver) -> None:
    publish(publisher, 0)
    seen = await receiver.next_version(None, 10)
    with pytest.raises(WaitTimeout, match="which is alive"):
        await receiver.next_version(seen, 0.3)
    os.kill(publisher.process_id, signal.SIGKILL)
    with pytest.raises(PublisherLost, match=r"publisher of epoch 0 .* silent"):
        await receiver.next_version(seen, 1.5)
    with pytest.raises(PublisherLost, match="ended with code -9"):
        publish(publisher, 1)


async def test_weights_that_do_not_fit_the_layout_are_refused(publisher: WeightPublisher) -> None:
    given = weights(0)
    with pytest.raises(WeightsError, match=r"1 tensors .* not given: \['head'\]"):
        publisher.publish(0, [(name, given[name]) for name in ("embed", "norm")])
    with pytest.raises(WeightsError, match=r"'embed' is float32 .* float64"):
        publisher.publish(0, [("embed", given["embed"].astype(np.float64))])
    publish(publisher, 1)
    with pytest.raises(WeightsError, match="versions only rise"):
        publish(publisher, 1)


async def test_closing_ends_the_process_and_removes_the_store(publisher: WeightPublisher) -> None:
    publisher.close()
    assert not psutil.pid_exists(publisher.process_id)
    assert not publisher.store.exists()


class Corruptor:
    """Between receiver and publisher; spoils the next `spoiled` chunks that pass and drops `dropped`."""

    def __init__(self, address: PublisherAddress, *, spoiled: int = 0, dropped: int = 0) -> None:
        context = zmq.asyncio.Context.instance()
        self._front = context.socket(zmq.ROUTER)
        port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self._back = context.socket(zmq.DEALER)
        self._back.connect(address.requests)
        self._spoiled, self.dropped = spoiled, dropped
        self.address = PublisherAddress(
            epoch=address.epoch, announce=address.announce, requests=f"tcp://127.0.0.1:{port}"
        )
        self._tasks = [asyncio.create_task(self._forward()), asyncio.create_task(self._return())]

    async def _forward(self) -> None:
        while True:
            self._peer, request = await self._front.recv_multipart()
            await self._back.send(request)

    async def _return(self) -> None:
        while True:
            frames = await self._back.recv_multipart()
            is_chunk = len(frames) == 2
            if is_chunk and self.dropped:
                self.dropped -= 1
                continue
            if is_chunk and self._spoiled:
                self._spoiled -= 1
                frames[1] = bytes([frames[1][0] ^ 1]) + frames[1][1:]
            await self._front.send_multipart([self._peer, *frames])

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._front.close(0)
        self._back.close(0)


@pytest.mark.parametrize("fault", ["spoiled", "dropped"])
async def test_a_spoiled_or_lost_chunk_is_asked_for_again(fault: str, publisher: WeightPublisher, board: Board) -> None:
    publish(publisher, 0)
    async with receiving_through(Corruptor(publisher.address, **{fault: 2}), board) as receiver:
        identity = await receiver.next_version(None, 10)
        assert_holds(receiver.store_path, identity)
        assert receiver.stats.rerequests >= 2


async def test_a_fetch_that_takes_too_long_is_given_up_and_the_newest_version_fetched_instead(
    publisher: WeightPublisher, board: Board
) -> None:
    publish(publisher, 0)
    hasty = CONFIG.model_copy(update={"update_timeout_s": 0.2})
    corruptor = Corruptor(publisher.address, dropped=1_000_000)
    async with receiving_through(corruptor, board, hasty) as receiver:
        await until(lambda: receiver.stats.interrupted >= 2)
        with pytest.raises(WaitTimeout, match="which is alive"):
            await receiver.next_version(None, 0.3)
        publish(publisher, 1)
        corruptor.dropped = 0
        assert_holds(receiver.store_path, await receiver.next_version(Identity(0, 0), 10))


async def test_a_request_too_large_to_be_one_ends_its_connection_and_not_the_publisher(
    publisher: WeightPublisher, receiver: WeightReceiver
) -> None:
    with zmq.asyncio.Context.instance().socket(zmq.DEALER) as stranger:
        stranger.connect(publisher.address.requests)
        await stranger.send(b"x" * 100_000)
        publish(publisher, 0)
        assert await receiver.next_version(None, 10) == (0, 0)


async def test_a_chunk_that_stays_corrupt_is_refused_and_nothing_is_applied(
    publisher: WeightPublisher, board: Board
) -> None:
    publish(publisher, 0)
    async with receiving_through(Corruptor(publisher.address, spoiled=1000), board) as receiver:
        with pytest.raises(WeightsCorrupt, match="failed its hash"):
            await receiver.next_version(None, 10)
        assert WeightStore.open(receiver.store_path).identity is None


@asynccontextmanager
async def receiving_through(
    corruptor: Corruptor, board: Board, config: WeightsConfig = CONFIG
) -> AsyncIterator[WeightReceiver]:
    board.address = corruptor.address
    receiver = WeightReceiver(board.publisher, store_path(RUN, "receiver"), config)
    yield receiver
    await receiver.close()
    await corruptor.close()


async def test_another_model_is_refused(publisher: WeightPublisher, receiver: WeightReceiver, board: Board) -> None:
    publish(publisher, 0)
    seen = await receiver.next_version(None, 10)
    other = layout_of([("embed", "float32", [10])])
    with WeightPublisher(other, f"{RUN}-other", 1, CONFIG) as stranger:
        stranger.publish(0, [("embed", np.zeros(10, np.float32))])
        board.address = stranger.address
        with pytest.raises(WeightsCorrupt, match="not those that this receiver started with"):
            await receiver.next_version(seen, 10)
    remove_stores(f"{RUN}-other")
