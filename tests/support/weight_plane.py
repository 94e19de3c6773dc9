"""A weight plane of real processes, and a proxy in it that loses, spoils and delays chunks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import zmq
import zmq.asyncio

from async_grpo.config.weights import WeightsConfig
from async_grpo.weights.manifest import TensorLayout, WeightVersion, make_layout
from async_grpo.weights.node.receiver import SharedWeightReceiver
from async_grpo.weights.shared_memory import store_path
from async_grpo.weights.store import WeightStore
from async_grpo.weights.zmq.messages import ParentAssignment, TrackerReply
from async_grpo.weights.zmq.sender import ZmqWeightSender
from async_grpo.wire import encode
from async_grpo.wire.board import PublisherAddress

RUN = f"test-weight-plane-{os.getpid()}"
LAYOUT = make_layout(
    [
        ("embed", "bfloat16", [400, 256]),
        ("norm", "float32", [77]),
        ("frozen", "float16", [64, 64]),
        ("experts", "float8_e4m3fn", [100, 301]),
        ("head", "float32", [50, 301]),
    ]
)
CONFIG = WeightsConfig(chunk_bytes=8192, heartbeat_s=0.3, request_timeout_s=2.0)

Arrays = dict[str, npt.NDArray[np.generic]]


class Board:
    """Stands for the run board: where the publisher listens."""

    address: PublisherAddress | None = None

    async def publisher_address(self) -> PublisherAddress | None:
        return self.address


def with_(**changes: object) -> WeightsConfig:
    """`CONFIG` with other values."""
    return CONFIG.model_copy(update=changes)


def random_weights(seed: int, layout: TensorLayout = LAYOUT) -> Arrays:
    """Every byte drawn anew for every seed, but for the tensor that is frozen."""
    random = np.random.default_rng(seed)
    weights: Arrays = {spec.name: random.integers(0, 256, spec.nbytes, np.uint8) for spec in layout.tensors}
    if "frozen" in weights:
        weights["frozen"] = np.arange(layout.by_name()["frozen"].nbytes, dtype=np.uint8)
    return weights


def step(weights: Arrays, seed: int) -> Arrays:
    """What an optimizer step leaves: one value in forty moves by one."""
    random = np.random.default_rng(seed)
    moved: Arrays = {}
    for spec in LAYOUT.tensors:
        items = weights[spec.name].copy().view(np.uint8)
        if spec.name != "frozen":
            items[random.integers(0, len(items), max(1, len(items) // 40))] += 1
        moved[spec.name] = items
    return moved


def publish(publisher: ZmqWeightSender, version: int) -> None:
    """The weights that `assert_holds` expects of this version."""
    publisher.publish_weights(version, random_weights(version).items())


def assert_holds(path: Path, identity: WeightVersion, weights: Arrays | None = None) -> None:
    """The store has exactly these bytes."""
    snapshot = WeightStore.open(path).snapshot(identity)
    wanted = weights or random_weights(identity.version)
    assert {spec.name: bytes(data) for spec, data in snapshot} == {name: a.tobytes() for name, a in wanted.items()}
    snapshot.verify()


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for it, or fail."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def receiving(
    board: Board, config: WeightsConfig = CONFIG, *, store: str = "node", name: str = ""
) -> AsyncIterator[SharedWeightReceiver]:
    """A rollout server's receiver; those of one `store` share a process."""
    receiver = SharedWeightReceiver(board.publisher_address, store_path(RUN, store), config, name=name)
    try:
        yield receiver
    finally:
        await receiver.close()


class Proxy:
    """Between the receivers and the publisher, chunks and control. `chunks` counts those that passed.

    `spoil`, `lose`: as many chunks to come are changed, or dropped; `pause_s` before every chunk. `impostor`: while
    it is set, receivers are told to fetch from the relay at this endpoint.
    """

    def __init__(self, address: PublisherAddress) -> None:
        context = zmq.asyncio.Context.instance()
        self.spoil = self.lose = self.chunks = 0
        self.pause_s = 0.0
        self.impostor = ""
        self._control, control = self._listen(context)
        self._front, self._chunk_endpoint = self._listen(context)
        self._control_back: dict[bytes, zmq.asyncio.Socket] = {}
        self._chunk_backs: dict[bytes, zmq.asyncio.Socket] = {}
        self._requests = address.requests
        self._publisher_chunks = ""
        self.address = msgspec.structs.replace(address, requests=control)
        self._tasks = {asyncio.create_task(self._forward_control()), asyncio.create_task(self._forward_chunks())}

    @staticmethod
    def _listen(context: zmq.asyncio.Context) -> tuple[zmq.asyncio.Socket, str]:
        front = context.socket(zmq.ROUTER)
        return front, f"tcp://127.0.0.1:{front.bind_to_random_port('tcp://127.0.0.1')}"

    def _connect(self, endpoint: str) -> zmq.asyncio.Socket:
        back = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        back.connect(endpoint)
        return back

    async def _forward_control(self) -> None:
        while True:
            peer, request = await self._control.recv_multipart()
            if peer not in self._control_back:
                self._control_back[peer] = back = self._connect(self._requests)
                self._tasks.add(asyncio.create_task(self._return_control(peer, back)))
            await self._control_back[peer].send(request)

    async def _return_control(self, peer: bytes, back: zmq.asyncio.Socket) -> None:
        while True:
            payload = await back.recv()
            reply = msgspec.msgpack.decode(payload, type=TrackerReply)
            if isinstance(reply, ParentAssignment) and not reply.relay:
                self._publisher_chunks = reply.parent
                parent = self.impostor or self._chunk_endpoint
                payload = encode(ParentAssignment(parent=parent, relay=bool(self.impostor)))
            await self._control.send_multipart([peer, payload])

    async def _forward_chunks(self) -> None:
        while True:
            peer, request = await self._front.recv_multipart()
            if peer not in self._chunk_backs:
                self._chunk_backs[peer] = back = self._connect(self._publisher_chunks)
                self._tasks.add(asyncio.create_task(self._return_chunks(peer, back)))
            await self._chunk_backs[peer].send(request)

    async def _return_chunks(self, peer: bytes, back: zmq.asyncio.Socket) -> None:
        while True:
            frames = await back.recv_multipart()
            if len(frames) == 2:
                await asyncio.sleep(self.pause_s)
                if self.lose:
                    self.lose -= 1
                    continue
                if self.spoil:
                    self.spoil -= 1
                    frames[1] = bytes([frames[1][0] ^ 1]) + frames[1][1:]
                self.chunks += 1
            await self._front.send_multipart([peer, *frames])

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for owned in (self._control, self._front, *self._control_back.values(), *self._chunk_backs.values()):
            owned.close(0)


@asynccontextmanager
async def proxy_to(publisher: ZmqWeightSender, board: Board) -> AsyncIterator[Proxy]:
    """The board names the proxy; it ends with the block."""
    proxy = Proxy(publisher.address)
    board.address = proxy.address
    try:
        yield proxy
    finally:
        await proxy.close()
