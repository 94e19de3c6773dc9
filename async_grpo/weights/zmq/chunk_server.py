"""Serves chunks of versions that are whole or still arriving; used by the publisher and by every relay.

    receiver --ChunkRequest--> known and there?  --> ChunkReply + bytes, in place
                               not there yet?    --> parked; `arrived` or `offer` answers it
                               replaced?         --> VersionGone

It owns one ROUTER socket and never waits: its process polls the socket and calls `serve`. The bytes that it sends lie
in a slot of the store; if the slot is overwritten before they are sent, the chunk fails its hash at the receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import zmq

from async_grpo.weights.chunks import ServedVersion
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.zmq.messages import ChunkOrder, ChunkPending, ChunkReply, ChunkRequest, FetchDone, VersionGone
from async_grpo.weights.zmq.sockets import Socket
from async_grpo.wire import encode

MAX_REQUEST_BYTES = 4096
"""A request is a few numbers; a peer that sends more is not one of ours and is disconnected."""

MAX_PARKED = 4096
"""Most requests that wait for chunks. Further ones go unanswered; their senders repeat them."""

_SERVED_AT_ONCE = 16

_orders = msgspec.msgpack.Decoder(ChunkOrder)


@dataclass(slots=True)
class _Use:
    since_s: float
    last_s: float


class ChunkServer:
    """Answers requests for the versions that it was given, and counts what it sends."""

    def __init__(self, router: Socket, clock: Callable[[], float], *, idle_s: float, max_fetch_s: float) -> None:
        """A receiver that requests nothing for `idle_s`, or fetches for `max_fetch_s`, no longer protects a version."""
        self.served_bytes = self.served_chunks = self.served_patches = self.unsigned = 0
        self._router = router
        self._clock = clock
        self._idle_s, self._max_fetch_s = idle_s, max_fetch_s
        self._versions: dict[WeightVersion, ServedVersion] = {}
        self._parked: dict[tuple[WeightVersion, int], dict[bytes, ChunkRequest]] = {}
        self._uses: dict[WeightVersion, dict[bytes, _Use]] = {}

    def offer_version(self, served: ServedVersion) -> None:
        """Serve this version from now on, as far as it has arrived."""
        self._versions[served.identity] = served
        for identity, index in list(self._parked):
            if identity == served.identity or self._is_gone(identity):
                self._answer_parked(identity, index)

    def answer_waiting(self, identity: WeightVersion, index: int) -> None:
        """The chunk is verified: answer the requests that wait for it."""
        if (identity, index) in self._parked:
            self._answer_parked(identity, index)

    def withdraw_version(self, identity: WeightVersion) -> None:
        """Stop serving this version: its slot is about to be overwritten."""
        self._versions.pop(identity, None)
        self._uses.pop(identity, None)
        for parked, index in list(self._parked):
            if parked == identity:
                for peer in self._parked.pop((parked, index)):
                    self._send_gone(peer, identity)

    def send_pending(self) -> None:
        """Tell receivers that wait that this server is alive; called every heartbeat."""
        for peer in {peer for waiting in self._parked.values() for peer in waiting}:
            self._router.send_multipart([peer, encode(ChunkPending())])

    def get_version(self, identity: WeightVersion | None) -> ServedVersion | None:
        """The version that is served as `identity`; None if it is not served."""
        return self._versions.get(identity) if identity is not None else None

    def in_use_since(self, identity: WeightVersion | None) -> float | None:
        """When the oldest fetch that still goes on began; None if no receiver fetches this version."""
        now, uses = self._clock(), self._uses.get(identity, {}) if identity is not None else {}
        return min((use.since_s for use in uses.values() if self._is_live(use, now)), default=None)

    def serve_requests(self) -> None:
        """Answer some of the requests that the socket has."""
        with suppress(zmq.Again):
            for _ in range(_SERVED_AT_ONCE):
                self.handle_message(self._router.recv_multipart(zmq.DONTWAIT))

    def handle_message(self, frames: Sequence[bytes]) -> None:
        """Answer one message from the socket."""
        peer, payload = frames[0], frames[-1]
        try:
            order = _orders.decode(payload)
        except msgspec.MsgspecError:
            return  # not one of ours: an unanswered request is repeated or given up by its sender
        match order:
            case FetchDone():
                self._uses.get(order.identity, {}).pop(peer, None)
            case ChunkRequest():
                self._handle_request(peer, order)

    def _handle_request(self, peer: bytes, request: ChunkRequest) -> None:
        identity = request.identity
        served = self._versions.get(identity)
        if served is None:
            if self._is_gone(identity):
                self._send_gone(peer, identity)
            else:
                self._park(peer, request)
        elif not request.is_signed(served.key) or not 0 <= request.index < len(served.chunks):
            self.unsigned += 1
        else:
            now = self._clock()
            self._uses.setdefault(identity, {}).setdefault(peer, _Use(now, now)).last_s = now
            if served.has_chunk(request.index):
                self._send(peer, served, request)
            else:
                self._park(peer, request)

    def _send(self, peer: bytes, served: ServedVersion, request: ChunkRequest) -> None:
        index = request.index
        patch = served.get_patch(index) if request.patch else None
        data = served.chunks[index].view(served.block) if patch is None else patch
        reply = ChunkReply(**served.identity._asdict(), index=index, patch=patch is not None)
        self._router.send_multipart([peer, encode(reply), data], flags=zmq.DONTWAIT, copy=False)
        self.served_bytes += len(data)
        self.served_patches += patch is not None
        self.served_chunks += patch is None

    def _send_gone(self, peer: bytes, identity: WeightVersion) -> None:
        self._router.send_multipart([peer, encode(VersionGone(**identity._asdict()))])

    def _is_gone(self, identity: WeightVersion) -> bool:
        """The version will never come: a newer one is already here."""
        return identity not in self._versions and any(identity < newer for newer in self._versions)

    def _park(self, peer: bytes, request: ChunkRequest) -> None:
        if len(self._parked) < MAX_PARKED:
            waiting = self._parked.setdefault((request.identity, request.index), {})
            if len(waiting) < MAX_PARKED:
                waiting[peer] = request

    def _answer_parked(self, identity: WeightVersion, index: int) -> None:
        for peer, request in self._parked.pop((identity, index)).items():
            self._handle_request(peer, request)

    def _is_live(self, use: _Use, now: float) -> bool:
        return now - use.last_s < self._idle_s and now - use.since_s < self._max_fetch_s
