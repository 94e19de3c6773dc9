"""Trainers and receivers are killed in the middle of a version, links of a chain are lost: whole versions arrive."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import numpy as np
import pytest

from async_grpo.config import RunConfig
from async_grpo.errors import WaitTimeout, WeightsError
from async_grpo.weights import make_receiver, make_sender
from async_grpo.weights.base import WeightReceiver
from async_grpo.weights.folder.objects import open_objects
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.node.receiver import SharedWeightReceiver
from async_grpo.weights.shared_memory import remove_stores, store_path
from async_grpo.weights.source_reader import SourceReader
from async_grpo.wire import decode
from async_grpo.wire.board import PublisherAddress
from tests.support.weight_plane import LAYOUT, Arrays, Board, random_weights
from tests.support.weight_publisher import weights_of
from tests.support.weight_transports import PLACES, config_of, made_place

NEVER = WeightVersion(-1, -1)
COMES_S = 60.0


class Trainer:
    """The process of `weight_publisher`."""

    def __init__(self, config: RunConfig, epoch: int) -> None:
        program = [sys.executable, "-m", "tests.support.weight_publisher", config.model_dump_json(), str(epoch)]
        self._process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.epoch = epoch
        self._version = -1
        self.address = decode(bytes.fromhex(self._answer()["address"]), PublisherAddress)

    def order(self) -> WeightVersion:
        """Have the next version published, and do not wait for it."""
        self._version += 1
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self._version}\n")
        self._process.stdin.flush()
        return WeightVersion(self.epoch, self._version)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=COMES_S)

    def _answer(self) -> dict[str, str]:
        assert self._process.stdout is not None
        answer: dict[str, str] = json.loads(self._process.stdout.readline())
        return answer


@contextmanager
def run_through(transport: str, **keys: object) -> Iterator[RunConfig]:
    with made_place(transport) as place:
        config = config_of("killed", {**place, **keys})
        try:
            yield config
        finally:
            remove_stores(config.name_with_digest)


async def check_newest(receiver: WeightReceiver, seen: WeightVersion) -> WeightVersion:
    """The next version is newer, and whole."""
    newest = await receiver.wait_for_newer_version(seen, COMES_S)
    assert newest > seen
    async with receiver.hold_newest() as held:
        reader = SourceReader().open(held)
        found = {spec.name: bytes(data) for spec, data in reader}
        reader.verify()
    assert found == {name: array.tobytes() for name, array in weights_of(*held.identity).items()}
    return held.identity


async def check_last(receiver: WeightReceiver, seen: WeightVersion, last: WeightVersion) -> None:
    while seen < last:
        seen = await check_newest(receiver, seen)
    assert seen == last
    with pytest.raises((WaitTimeout, WeightsError)):  # an engine is not told to load it again
        await receiver.wait_for_newer_version(last, 0.3)


KILLS = [
    pytest.param(
        transport, moments, marks=() if transport == "shared_filesystem" and moments == 1 else pytest.mark.slow
    )
    for transport in PLACES
    for moments in (1, 20)
]


@pytest.mark.parametrize(("transport", "moments"), KILLS)
async def test_a_trainer_is_killed_in_the_middle_of_a_version(transport: str, moments: int) -> None:
    random = np.random.default_rng(moments)
    board = Board()
    with run_through(transport) as config:
        receiver = make_receiver(config, board.publisher_address, name="server")
        seen = NEVER
        trainers = [Trainer(config, 0)]
        try:
            for epoch in range(1, moments + 1):
                board.address = trainers[-1].address
                first = trainers[-1].order()
                while seen < first:
                    seen = await check_newest(receiver, seen)
                for _ in range(3):
                    trainers[-1].order()
                await asyncio.sleep(random.uniform(0, 0.3))
                trainers[-1].kill()
                trainers.append(Trainer(config, epoch))
            board.address = trainers[-1].address
            await check_last(receiver, seen, trainers[-1].order())
        finally:
            trainers[-1].kill()
            await receiver.close()


@pytest.mark.parametrize(("transport", "moments"), KILLS)
async def test_a_receiver_is_killed_in_the_middle_of_a_version(transport: str, moments: int) -> None:
    random = np.random.default_rng(moments)
    board = Board()
    with run_through(transport) as config:
        receiver = make_receiver(config, board.publisher_address, name="server")
        assert isinstance(receiver, SharedWeightReceiver)
        trainer = Trainer(config, 0)
        try:
            board.address = trainer.address
            last = trainer.order()
            seen = await check_newest(receiver, NEVER)
            for _ in range(moments):
                for _ in range(3):
                    last = trainer.order()
                await asyncio.sleep(random.uniform(0, 0.3))
                assert receiver.process_id is not None
                os.kill(receiver.process_id, signal.SIGKILL)
                while seen < last:
                    seen = await check_newest(receiver, seen)
            assert receiver.restarts >= moments
            await check_last(receiver, seen, last)
        finally:
            trainer.kill()
            await receiver.close()


def small_steps(version: int) -> Arrays:
    """77 numbers of which every version changes each."""
    weights = random_weights(0)
    return {**weights, "norm": weights["norm"] + np.uint8(version)}


@asynccontextmanager
async def joining(config: RunConfig, board: Board, store: str) -> AsyncIterator[SharedWeightReceiver]:
    """A receiver of another machine."""
    path = store_path(config.name_with_digest, store)
    receiver = SharedWeightReceiver(board.publisher_address, path, config.weights, name=store)
    try:
        yield receiver
    finally:
        await receiver.close()


async def arrives(receiver: WeightReceiver, version: int) -> None:
    newest = WeightVersion(0, -1)
    while newest.version < version:
        newest = await receiver.wait_for_newer_version(newest, COMES_S)
    async with receiver.hold_newest() as held:
        found = {spec.name: bytes(data) for spec, data in SourceReader().open(held)}
    assert found == {name: array.tobytes() for name, array in small_steps(version).items()}


@pytest.mark.parametrize(
    ("transport", "versions"),
    [("shared_filesystem", 6), pytest.param("object_store", 50, marks=pytest.mark.slow)],
)
async def test_a_late_receiver_follows_the_chain_and_a_lost_link_is_made_good(transport: str, versions: int) -> None:
    board = Board()
    with run_through(transport, dense_every=100) as config:
        sender = make_sender(config, LAYOUT, 0)
        board.address = sender.address
        objects = open_objects(config.weights)
        try:
            async with joining(config, board, "follower") as follower:
                for version in range(versions):
                    sender.publish_weights(version, small_steps(version).items())
                    await arrives(follower, version)
                assert follower.stats.received_bytes < LAYOUT.total_bytes * 1.1  # one dense version and small patches
            chain = [name for name in objects.list_names(sender.address.announce) if not name.endswith("/head")]
            assert [name for name in chain if name.endswith(".dense")] == [f"{sender.address.announce}/000000000.dense"]
            async with joining(config, board, "late") as late:
                await arrives(late, versions - 1)
                assert late.stats.fallbacks == {}
            objects.remove([f"{sender.address.announce}/{versions // 2:09d}.version"])
            async with joining(config, board, "lost") as lost:
                await arrives(lost, versions - 1)
                assert lost.stats.fallbacks["lost link"] >= 1
        finally:
            sender.close()
        assert objects.list_names(config.name_with_digest) == []
