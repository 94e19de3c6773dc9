"""What every transport of weights promises to the trainer and to rollout servers (`async_grpo.weights.base`).

A transport is one entry of TRANSPORTS, with one or two slots in the receiver's store. All tests of a transport share
one sender, so versions rise from test to test.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass, field

import numpy as np
import psutil
import pytest
from msgspec.structs import replace

from async_grpo.config import RunConfig
from async_grpo.errors import PublisherLost, WaitTimeout, WeightsCorrupt, WeightsError, WeightsReplaced
from async_grpo.weights import make_receiver, make_sender
from async_grpo.weights.base import HeldWeights, WeightReceiver
from async_grpo.weights.folder.chain import Head, decode_with_digest
from async_grpo.weights.folder.objects import open_objects
from async_grpo.weights.folder.sender import FolderWeightSender
from async_grpo.weights.manifest import TensorLayout, WeightVersion, make_layout
from async_grpo.weights.sender import WeightSender
from async_grpo.weights.shared_memory import remove_stores, run_folder
from async_grpo.weights.source_reader import SourceReader
from tests.support.weight_plane import LAYOUT, Arrays, Board, proxy_to, random_weights, step, until
from tests.support.weight_transports import config_of, made_place

NEVER = WeightVersion(0, -1)
COMES_S = 30.0
EPOCH = 1


@asynccontextmanager
async def through_a_bad_proxy(sender: WeightSender, board: Board, _: WeightVersion) -> AsyncIterator[None]:
    async with proxy_to(sender, board) as proxy:
        proxy.spoil = 1_000_000
        yield


@asynccontextmanager
async def through_a_damaged_copy(sender: WeightSender, board: Board, newest: WeightVersion) -> AsyncIterator[None]:
    """The board names a copy of the epoch's folder in which every block is wrong."""
    assert isinstance(sender, FolderWeightSender)
    objects = open_objects(sender.config)
    folder = sender.address.announce
    await until(lambda: f"{folder}/head" in objects.list_names(folder))
    await until(lambda: decode_with_digest(objects.read(f"{folder}/head"), Head, "head").identity == newest)
    for name in objects.list_names(folder):
        with suppress(FileNotFoundError):  # of a version that is not needed any more
            content = objects.read(name)
            damaged = bytes(byte ^ 1 for byte in content) if name.endswith((".dense", ".changes")) else content
            objects.write(name.replace(folder, "damaged/copy"), [damaged])
    board.address = replace(sender.address, announce="damaged/copy")
    yield


@dataclass(frozen=True)
class Transport:
    """One entry of PLACES, and how a test damages what travels."""

    name: str
    spoiling: Callable[[WeightSender, Board, WeightVersion], AbstractAsyncContextManager[None]]
    """Every byte that is fetched during the block is wrong."""
    marks: tuple[pytest.MarkDecorator, ...] = ()


TRANSPORTS = [
    Transport("zmq", spoiling=through_a_bad_proxy),
    Transport("zmq, three connections", spoiling=through_a_bad_proxy, marks=(pytest.mark.slow,)),
    Transport("zmq, one slot", spoiling=through_a_bad_proxy, marks=(pytest.mark.slow,)),
    Transport("shared_filesystem", spoiling=through_a_damaged_copy),
    Transport("shared_filesystem, one slot", spoiling=through_a_damaged_copy, marks=(pytest.mark.slow,)),
    Transport("object_store", spoiling=through_a_damaged_copy, marks=(pytest.mark.slow,)),
]


@contextmanager
def sending(config: RunConfig, *, layout: TensorLayout = LAYOUT, epoch: int = EPOCH) -> Iterator[WeightSender]:
    """A sender of a run of its own."""
    sender = make_sender(config, layout, epoch)
    try:
        yield sender
    finally:
        sender.close()
        remove_stores(config.name_with_digest)


@dataclass
class Plane:
    """The shared sender, and the board that names it to receivers."""

    transport: Transport
    config: RunConfig
    sender: WeightSender
    board: Board = field(default_factory=Board)
    versions: Iterator[int] = field(default_factory=itertools.count)

    def run(self, name: str) -> RunConfig:
        """Another run on the same transport."""
        return config_of(name, self.config.weights.model_dump(exclude_defaults=True))

    def publish(self, weights: Arrays | None = None) -> tuple[WeightVersion, dict[str, bytes]]:
        """Publish the next version; returns it and its bytes."""
        version = next(self.versions)
        weights = random_weights(version) if weights is None else weights
        self.sender.publish_weights(version, weights.items())
        return WeightVersion(EPOCH, version), as_bytes(weights)

    @asynccontextmanager
    async def receiving(self) -> AsyncIterator[WeightReceiver]:
        """A rollout server's receiver."""
        receiver = make_receiver(self.config, self.board.publisher_address, name="server")
        try:
            yield receiver
        finally:
            await receiver.close()


CASES = [pytest.param(transport, id=transport.name, marks=transport.marks) for transport in TRANSPORTS]


@pytest.fixture(scope="module", params=CASES)
def shared(request: pytest.FixtureRequest) -> Iterator[Plane]:
    transport: Transport = request.param
    with made_place(transport.name) as keys:
        config = config_of("contract", keys)
        with sending(config) as sender:
            yield Plane(transport, config, sender)


@pytest.fixture
def plane(shared: Plane) -> Plane:
    shared.board.address = shared.sender.address
    return shared


@pytest.fixture
async def receiver(plane: Plane) -> AsyncIterator[WeightReceiver]:
    async with plane.receiving() as receiver:
        yield receiver


def as_bytes(weights: Arrays) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in weights.items()}


def read(held: HeldWeights) -> dict[str, bytes]:
    """What an engine loads."""
    reader = SourceReader().open(held)
    found = {spec.name: bytes(data) for spec, data in reader}
    reader.verify()
    return found


async def arrive(receiver: WeightReceiver, wanted: WeightVersion) -> int:
    """Wait until this version is there; returns how many came on the way."""
    seen = NEVER
    for came in itertools.count(1):
        newest = await receiver.wait_for_newer_version(seen, COMES_S)
        assert seen < newest <= wanted
        if newest == wanted:
            return came
        seen = newest
    raise AssertionError


async def test_every_version_arrives_bit_for_bit(plane: Plane, receiver: WeightReceiver) -> None:
    weights = random_weights(0)
    for seed in range(4):
        version, content = plane.publish(weights)
        await arrive(receiver, version)
        async with receiver.hold_newest() as held:
            assert held.identity == version
            assert read(held) == content
        weights = step(weights, seed)


async def test_a_late_joiner_gets_the_newest_version_and_no_other(plane: Plane) -> None:
    for _ in range(3):
        newest, content = plane.publish()
    await asyncio.sleep(0.3)  # until it is announced
    async with plane.receiving() as late:
        assert await arrive(late, newest) == 1
        async with late.hold_newest() as held:
            assert read(held) == content


async def test_versions_of_a_burst_may_be_skipped_and_the_last_one_arrives(
    plane: Plane, receiver: WeightReceiver
) -> None:
    for _ in range(30):
        newest, content = plane.publish()
    assert await arrive(receiver, newest) <= 30
    async with receiver.hold_newest() as held:
        assert read(held) == content


async def test_held_weights_stay_as_they_are_for_the_block(plane: Plane, receiver: WeightReceiver) -> None:
    version, content = plane.publish()
    await arrive(receiver, version)
    async with receiver.hold_newest() as held:
        reader = SourceReader().open(held)
        for _ in range(3):
            newest, _ = plane.publish()
            await asyncio.sleep(0.2)
        assert {spec.name: bytes(data) for spec, data in reader} == content
        reader.verify()
    await arrive(receiver, newest)
    for seed in range(2):  # as many as the store has room for
        newest, _ = plane.publish(random_weights(seed))
        await arrive(receiver, newest)
    with pytest.raises(WeightsCorrupt, match="overwritten"):
        reader.verify()
    with pytest.raises(WeightsReplaced):
        SourceReader().open(held)


async def test_a_version_names_the_tensors_that_changed_since_the_one_before(
    plane: Plane, receiver: WeightReceiver
) -> None:
    first = random_weights(1)
    second = {**first, "norm": first["norm"] + np.uint8(1)}
    before, _ = plane.publish(first)
    await arrive(receiver, before)
    version, _ = plane.publish(second)
    await arrive(receiver, version)
    async with receiver.hold_newest() as held:
        reader = SourceReader().open(held)
    changed = reader.changed_since(before)
    assert changed is not None
    assert [spec.name for spec in changed] == ["norm"]
    assert reader.changed_since(NEVER) is None


async def test_bytes_that_fail_their_hash_are_refused(plane: Plane) -> None:
    newest, _ = plane.publish()
    async with plane.transport.spoiling(plane.sender, plane.board, newest), plane.receiving() as receiver:
        with pytest.raises(WeightsCorrupt, match="failed its hash"):
            await receiver.wait_for_newer_version(NEVER, COMES_S)


async def test_weights_that_do_not_fit_are_refused_and_the_next_version_arrives(
    plane: Plane, receiver: WeightReceiver
) -> None:
    published, _ = plane.publish()
    version = next(plane.versions)
    publish = plane.sender.publish_weights
    with pytest.raises(WeightsError, match=r"4 tensors .* not given: \['experts', 'frozen', 'head'\]"):
        publish(version, [("embed", random_weights(0)["embed"])])
    with pytest.raises(WeightsError, match=r"'norm' is float32 .* float64"):
        publish(version, [("norm", np.zeros(77))])
    with pytest.raises(WeightsError, match="versions must rise"):
        publish(published.version, random_weights(0).items())
    newest, _ = plane.publish()
    await arrive(receiver, newest)


async def test_a_timed_out_wait_names_the_role_it_waited_for(plane: Plane) -> None:
    plane.board.address = None
    async with plane.receiving() as receiver:
        with pytest.raises(WaitTimeout, match="no trainer has set its address"):
            await receiver.wait_for_newer_version(NEVER, 0.3)
        plane.board.address = plane.sender.address
        version, _ = plane.publish()
        await arrive(receiver, version)
        with pytest.raises(WaitTimeout, match=f"newer than {version} from .* alive"):
            await receiver.wait_for_newer_version(version, 0.3)


async def test_a_later_epoch_is_newer_at_any_version_and_an_earlier_one_is_refused(
    plane: Plane, receiver: WeightReceiver
) -> None:
    before, _ = plane.publish()
    await arrive(receiver, before)
    with sending(plane.run("restarted"), epoch=EPOCH + 1) as restarted:
        restarted.publish_weights(0, random_weights(0).items())
        plane.board.address = restarted.address
        newest = await receiver.wait_for_newer_version(before, COMES_S)
        assert newest == (EPOCH + 1, 0)
        plane.board.address = plane.sender.address
        plane.publish()
        with pytest.raises(WaitTimeout, match=f"newer than {newest}"):
            await receiver.wait_for_newer_version(newest, 2.0)


async def test_the_end_of_the_sender_is_named(plane: Plane, receiver: WeightReceiver) -> None:
    with sending(plane.run("ends"), epoch=EPOCH + 2) as ends:
        ends.publish_weights(0, random_weights(0).items())
        plane.board.address = ends.address
        newest = await receiver.wait_for_newer_version(NEVER, COMES_S)
    with pytest.raises(PublisherLost, match=rf"epoch {EPOCH + 2} .* silent"):
        await receiver.wait_for_newer_version(newest, 3.0)


async def test_another_model_is_refused(plane: Plane, receiver: WeightReceiver) -> None:
    version, _ = plane.publish()
    await arrive(receiver, version)
    layout = make_layout([("embed", "float32", [10])])
    with sending(plane.run("other"), layout=layout, epoch=EPOCH + 3) as other:
        other.publish_weights(0, [("embed", np.zeros(10, np.float32))])
        plane.board.address = other.address
        with pytest.raises(WeightsCorrupt, match="differ from those that this receiver started with"):
            await receiver.wait_for_newer_version(version, COMES_S)


async def test_closing_ends_all_processes_and_frees_the_memory(plane: Plane) -> None:
    before = psutil.Process().children(recursive=True)
    with sending(plane.run("closed")) as sender:
        config = plane.run("closed")
        plane.board.address = sender.address
        sender.publish_weights(0, random_weights(0).items())
        receiver = make_receiver(config, plane.board.publisher_address, name="server")
        await arrive(receiver, WeightVersion(EPOCH, 0))
        for _ in range(2):
            await receiver.close()
        sender.close()
        assert not run_folder(config.name_with_digest).exists() or not list(
            run_folder(config.name_with_digest).glob("*.weights")
        )
    left = set(psutil.Process().children(recursive=True)) - set(before)
    assert [process.cmdline() for process in left if process.status() != psutil.STATUS_ZOMBIE] == []
