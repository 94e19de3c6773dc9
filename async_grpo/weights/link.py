"""One receiver's connection to one publisher: hear announcements, fetch a version chunk by chunk."""

from __future__ import annotations

import time
from collections import deque

import msgspec
import zmq
import zmq.asyncio

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import WeightsCorrupt, WeightsError
from async_grpo.weights.manifest import Identity, Manifest, hash_chunk
from async_grpo.weights.messages import (
    Announcement,
    ChunkReply,
    ChunkRequest,
    Gone,
    ManifestReply,
    ManifestRequest,
    Reply,
    Request,
)
from async_grpo.wire import decode, encode
from async_grpo.wire.board import PublisherAddress

MAX_ATTEMPTS = 4
"""A chunk that failed its hash, or went unanswered, this many times is given up."""

HEARTBEATS_OF_SILENCE = 4
"""A publisher that was not heard for this many heartbeats is taken for lost; it is looked up as often."""

MAX_MANIFEST_BYTES = 64 << 20
"""Room for the hashes of a million chunks; a frame above this and a chunk ends the connection."""

_ZMQ_HEARTBEAT_MS = 500
_replies = msgspec.msgpack.Decoder(Reply)


class FetchInterrupted(WeightsError):
    """This version cannot be had (any more): replaced by a newer one, or the publisher is silent."""


class PublisherLink:
    """Sockets to the publisher at `address`. One fetch at a time."""

    def __init__(self, address: PublisherAddress, config: WeightsConfig) -> None:
        """Connects in the background; needs a running event loop."""
        self.address = address
        self.heard_s = time.monotonic()
        self._rerequests = 0
        self._config = config
        context = zmq.asyncio.Context.instance()
        self._announcements = context.socket(zmq.SUB)
        self._announcements.setsockopt(zmq.CONFLATE, 1)  # only the newest announcement matters
        self._announcements.setsockopt(zmq.SUBSCRIBE, b"")
        self._requests = context.socket(zmq.DEALER)
        for connection, endpoint in ((self._announcements, address.announce), (self._requests, address.requests)):
            connection.setsockopt(zmq.LINGER, 0)
            connection.setsockopt(zmq.HEARTBEAT_IVL, _ZMQ_HEARTBEAT_MS)
            connection.setsockopt(zmq.MAXMSGSIZE, config.chunk_bytes + MAX_MANIFEST_BYTES)
            connection.connect(endpoint)

    async def announcement(self, timeout_s: float) -> Identity | None:
        """The newest version announced since the last call; None if nothing was heard or there is none."""
        if not await self._announcements.poll(_milliseconds(timeout_s)):
            return None
        self.heard_s = time.monotonic()
        return decode(await self._announcements.recv(), Announcement).identity

    async def newest_manifest(self) -> Manifest | None:
        """The newest manifest; None if nothing was published yet. Raises FetchInterrupted."""
        for _ in range(MAX_ATTEMPTS):
            await self._send(ManifestRequest())
            deadline = time.monotonic() + self._config.request_timeout_s
            while (remaining := deadline - time.monotonic()) > 0:
                reply, _payload = await self._receive(remaining)
                if isinstance(reply, ManifestReply):
                    return reply.manifest
            self._rerequests += 1
        raise FetchInterrupted(f"{self.address.requests} did not answer a manifest request.")

    async def fetch(self, manifest: Manifest, block: memoryview) -> None:
        """Fill `block` with the version of `manifest`, every chunk proved by its hash.

        Raises FetchInterrupted if the version is gone or the publisher silent, and WeightsCorrupt
        if a chunk keeps failing its hash. `block` is then undefined.
        """
        plan = _Plan(len(manifest.chunk_hashes), self._config)
        while not plan.done:
            self._rerequests += plan.expire(time.monotonic())
            for index in plan.take(time.monotonic()):
                await self._send(ChunkRequest(epoch=manifest.epoch, version=manifest.version, index=index))
            reply, payload = await self._receive(plan.next_deadline - time.monotonic())
            match reply:
                case ChunkReply(epoch=manifest.epoch, version=manifest.version, index=index) if plan.awaits(index):
                    if _is_chunk(payload, manifest, index):
                        block[manifest.chunk(index)] = payload
                        plan.settle(index)
                    else:
                        plan.retry_corrupt(index)
                        self._rerequests += 1
                case Gone(epoch=manifest.epoch, version=manifest.version):
                    raise FetchInterrupted(f"{manifest.identity} is not served any more.")

    def take_rerequests(self) -> int:
        """Requests that were made more than once since the last call."""
        count, self._rerequests = self._rerequests, 0
        return count

    def close(self) -> None:
        """Close the sockets."""
        self._announcements.close()
        self._requests.close()

    async def _send(self, request: Request) -> None:
        await self._requests.send(encode(request))

    async def _receive(self, timeout_s: float) -> tuple[Reply | None, memoryview]:
        """The next reply and its payload; (None, empty) if none comes in time, or in a heartbeat.

        Raises FetchInterrupted if the publisher has fallen silent altogether.
        """
        if not await self._requests.poll(_milliseconds(min(timeout_s, self._config.heartbeat_s))):
            await self._check_alive()
            return None, memoryview(b"")
        frames = await self._requests.recv_multipart(copy=False)
        self.heard_s = time.monotonic()
        return _replies.decode(frames[0].buffer), frames[-1].buffer

    async def _check_alive(self) -> None:
        await self.announcement(0.0)
        silent_s = time.monotonic() - self.heard_s
        if silent_s > HEARTBEATS_OF_SILENCE * self._config.heartbeat_s:
            raise FetchInterrupted(f"{self.address.announce} has been silent for {silent_s:.1f} s.")


class _Plan:
    """Which chunks to ask for: never more than `credits` under way, late ones once more."""

    def __init__(self, chunks: int, config: WeightsConfig) -> None:
        self._todo = deque(range(chunks))
        self._deadlines: dict[int, float] = {}
        self._attempts = [0] * chunks
        self._config = config

    @property
    def done(self) -> bool:
        return not self._todo and not self._deadlines

    @property
    def next_deadline(self) -> float:
        return min(self._deadlines.values())

    def awaits(self, index: int) -> bool:
        return index in self._deadlines

    def take(self, now_s: float) -> list[int]:
        """Chunks to ask for now."""
        free = self._config.credits - len(self._deadlines)
        asked = [self._todo.popleft() for _ in range(min(free, len(self._todo)))]
        for index in asked:
            self._deadlines[index] = now_s + self._config.request_timeout_s
            self._attempts[index] += 1
        return asked

    def settle(self, index: int) -> None:
        """The chunk has come."""
        del self._deadlines[index]

    def expire(self, now_s: float) -> int:
        """Put late chunks back and say how many. Raises FetchInterrupted if one was late too often."""
        late = [index for index, deadline in self._deadlines.items() if deadline <= now_s]
        for index in late:
            if self._attempts[index] >= MAX_ATTEMPTS:
                raise FetchInterrupted(f"chunk {index} was asked for {MAX_ATTEMPTS} times and never came.")
            self._put_back(index)
        return len(late)

    def retry_corrupt(self, index: int) -> None:
        """The chunk failed its hash. Raises WeightsCorrupt if it keeps doing so."""
        if self._attempts[index] >= MAX_ATTEMPTS:
            raise WeightsCorrupt(
                f"chunk {index} failed its hash {MAX_ATTEMPTS} times; nothing of this version was applied. "
                "Check the network and the publisher's memory."
            )
        self._put_back(index)

    def _put_back(self, index: int) -> None:
        del self._deadlines[index]
        self._todo.appendleft(index)


def _is_chunk(payload: memoryview, manifest: Manifest, index: int) -> bool:
    part = manifest.chunk(index)
    return len(payload) == part.stop - part.start and hash_chunk(payload) == manifest.chunk_hashes[index]


def _milliseconds(seconds: float) -> int:
    return max(0, int(seconds * 1000) + 1)
