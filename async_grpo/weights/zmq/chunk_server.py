"""Serves chunks of whole and of growing versions: the publisher's half, and that of every relay.

    receiver --ChunkRequest--> known and there?  --> ChunkReply + bytes, in place
                               not there yet?    --> parked; `arrived` or `offer` answers it
                               replaced?         --> Gone

It owns one ROUTER socket and never waits: whoever polls hands in what is readable. What it sends lies
in a slot of the store; if that is overwritten on its way, the chunk fails its hash at the receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from async_grpo.weights.chunks import Chunk, Hashes
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.zmq.messages import (
    ChunkOrder,
    ChunkPending,
    ChunkReply,
    ChunkRequest,
    FetchDone,
    VersionGone,
    is_signed,
)
from async_grpo.weights.zmq.sockets import Socket
from async_grpo.wire import encode

MAX_REQUEST_BYTES = 4096
"""Requests are a few numbers; a peer that sends more is none of ours and is disconnected."""

MAX_PARKED = 4096
"""Requests that wait for chunks; more are not answered, and asked again by their senders."""

_orders = msgspec.msgpack.Decoder(ChunkOrder)


@dataclass(slots=True)
class ServedVersion:
    """One version as it lies in a slot. `arrived` marks the chunks that are verified; all, if it is None."""

    identity: WeightVersion
    key: bytes
    chunks: Sequence[Chunk]
    hashes: Hashes
    digest: bytes
    block: memoryview
    patches: Mapping[int, bytes | memoryview] = field(default_factory=dict)
    arrived: bytearray | None = None

    def has(self, index: int) -> bool:
        """Chunk `index` can be served."""
        return self.arrived is None or bool(self.arrived[index])


@dataclass(slots=True)
class _Use:
    since_s: float
    last_s: float


class ChunkServer:
    """Answers requests for the versions that it was given. Counts in `served_bytes` and the like."""

    def __init__(self, router: Socket, clock: Callable[[], float], *, idle_s: float, longest_s: float) -> None:
        """A receiver that asks nothing for `idle_s`, or fetches for `longest_s`, protects no version any more."""
        self.served_bytes = self.served_chunks = self.served_patches = self.unsigned = 0
        self._router = router
        self._clock = clock
        self._idle_s, self._longest_s = idle_s, longest_s
        self._versions: dict[WeightVersion, ServedVersion] = {}
        self._parked: dict[tuple[WeightVersion, int], dict[bytes, ChunkRequest]] = {}
        self._uses: dict[WeightVersion, dict[bytes, _Use]] = {}

    def offer(self, served: ServedVersion) -> None:
        """Serve it from now on, as far as it has arrived."""
        self._versions[served.identity] = served
        for identity, index in list(self._parked):
            if identity == served.identity or self._is_gone(identity):
                self._answer_parked(identity, index)

    def arrived(self, identity: WeightVersion, index: int) -> None:
        """The chunk is verified: whoever waits for it gets it."""
        if (identity, index) in self._parked:
            self._answer_parked(identity, index)

    def withdraw(self, identity: WeightVersion) -> None:
        """Its slot is about to be overwritten."""
        self._versions.pop(identity, None)
        self._uses.pop(identity, None)
        for parked, index in list(self._parked):
            if parked == identity:
                for peer in self._parked.pop((parked, index)):
                    self._send_gone(peer, identity)

    def reassure(self) -> None:
        """Tell those who wait that this server is there; called every heartbeat."""
        for peer in {peer for waiting in self._parked.values() for peer in waiting}:
            self._router.send_multipart([peer, encode(ChunkPending())])

    def served(self, identity: WeightVersion | None) -> ServedVersion | None:
        """What is served as `identity`."""
        return self._versions.get(identity) if identity is not None else None

    def in_use_since(self, identity: WeightVersion | None) -> float | None:
        """When the oldest fetch of it began that still goes on; None if nobody fetches it."""
        now, uses = self._clock(), self._uses.get(identity, {}) if identity is not None else {}
        live = [use.since_s for use in uses.values() if self._is_live(use, now)]
        return min(live, default=None)

    def handle(self, frames: Sequence[bytes]) -> None:
        """One message from the socket."""
        peer, payload = frames[0], frames[-1]
        try:
            order = _orders.decode(payload)
        except msgspec.MsgspecError:
            return  # not one of ours: an unanswered request is repeated or given up by its sender
        identity = WeightVersion(order.epoch, order.version)
        match order:
            case FetchDone():
                self._uses.get(identity, {}).pop(peer, None)
            case ChunkRequest():
                self._handle_request(peer, identity, order)

    def _handle_request(self, peer: bytes, identity: WeightVersion, request: ChunkRequest) -> None:
        served = self._versions.get(identity)
        if served is None:
            if self._is_gone(identity):
                self._send_gone(peer, identity)
            else:
                self._park(peer, identity, request)
        elif not is_signed(request, served.key) or not 0 <= request.index < len(served.chunks):
            self.unsigned += 1
        else:
            self._note_use(peer, identity)
            if served.has(request.index):
                self._send(peer, served, request)
            else:
                self._park(peer, identity, request)

    def _send(self, peer: bytes, served: ServedVersion, request: ChunkRequest) -> None:
        index = request.index
        patch = served.patches.get(index) if request.patch else None
        data = served.chunks[index].of(served.block) if patch is None else patch
        reply = ChunkReply(
            epoch=served.identity.epoch, version=served.identity.version, index=index, patch=patch is not None
        )
        self._router.send_multipart([peer, encode(reply), data], flags=zmq.DONTWAIT, copy=False)
        self.served_bytes += len(data)
        self.served_patches += patch is not None
        self.served_chunks += patch is None

    def _send_gone(self, peer: bytes, identity: WeightVersion) -> None:
        self._router.send_multipart([peer, encode(VersionGone(epoch=identity.epoch, version=identity.version))])

    def _is_gone(self, identity: WeightVersion) -> bool:
        """Never to come: something newer is here, or will be before it."""
        return identity not in self._versions and any(identity < newer for newer in self._versions)

    def _park(self, peer: bytes, identity: WeightVersion, request: ChunkRequest) -> None:
        if len(self._parked) < MAX_PARKED:
            waiting = self._parked.setdefault((identity, request.index), {})
            if len(waiting) < MAX_PARKED:
                waiting[peer] = request

    def _answer_parked(self, identity: WeightVersion, index: int) -> None:
        for peer, request in self._parked.pop((identity, index)).items():
            self._handle_request(peer, identity, request)

    def _note_use(self, peer: bytes, identity: WeightVersion) -> None:
        now = self._clock()
        use = self._uses.setdefault(identity, {}).setdefault(peer, _Use(now, now))
        use.last_s = now

    def _is_live(self, use: _Use, now: float) -> bool:
        return now - use.last_s < self._idle_s and now - use.since_s < self._longest_s
