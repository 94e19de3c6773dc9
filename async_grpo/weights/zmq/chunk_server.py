"""Serves chunks of complete and arriving versions. Used by the publisher and by every relay.

    receiver --ChunkRequest--> chunk is here        --> ChunkReply + bytes, without copying
                               has not arrived yet  --> parked until `answer_waiting` or `offer_version`
                               version was replaced --> VersionGone

The server never waits: its process polls the ROUTER socket and calls `serve_requests`. ZMQ sends the bytes from the
store's slot later, without a copy. If the slot is overwritten before that, the chunk fails its hash at the receiver.
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
"""A request is a few numbers. A peer that sends more is not one of ours and is disconnected."""

MAX_PARKED = 4096
"""Limit of parked requests. Further requests are dropped; their senders repeat them."""

_REQUESTS_PER_CALL = 16
"""Requests answered before the process polls its other sockets again."""

_orders = msgspec.msgpack.Decoder(ChunkOrder)


@dataclass(slots=True)
class _Fetching:
    """One receiver's fetch of one version."""

    started_s: float
    last_request_s: float


class ChunkServer:
    """Answers chunk requests for the offered versions, and counts what it sends."""

    def __init__(self, router: Socket, clock: Callable[[], float], *, idle_s: float, max_fetch_s: float) -> None:
        """A version counts as in use until a receiver has requested nothing for `idle_s` or fetches for `max_fetch_s`.

        Without these limits, a receiver that was killed would block its version's slot forever.
        """
        self.served_bytes = self.served_chunks = self.served_patches = self.unsigned = 0
        self._router = router
        self._clock = clock
        self._idle_s = idle_s
        self._max_fetch_s = max_fetch_s
        self._versions: dict[WeightVersion, ServedVersion] = {}
        self._parked: dict[tuple[WeightVersion, int], dict[bytes, ChunkRequest]] = {}
        self._fetches: dict[WeightVersion, dict[bytes, _Fetching]] = {}

    def offer_version(self, served: ServedVersion) -> None:
        """Serve this version from now on, each chunk as soon as it has arrived."""
        self._versions[served.identity] = served
        for identity, index in list(self._parked):
            if identity == served.identity or self._is_gone(identity):
                self._answer_parked(identity, index)

    def answer_waiting(self, identity: WeightVersion, index: int) -> None:
        """Answer the requests that wait for this chunk, which has arrived and is verified."""
        if (identity, index) in self._parked:
            self._answer_parked(identity, index)

    def withdraw_version(self, identity: WeightVersion) -> None:
        """Stop serving this version. Call it before its slot is overwritten."""
        self._versions.pop(identity, None)
        self._fetches.pop(identity, None)
        for parked_identity, index in list(self._parked):
            if parked_identity == identity:
                for peer in self._parked.pop((identity, index)):
                    self._send_gone(peer, identity)

    def send_pending(self) -> None:
        """Send `ChunkPending` to the receivers whose requests are parked, every heartbeat.

        Otherwise they would think that this server is dead, and fetch from another parent.
        """
        waiting_peers = {peer for requests in self._parked.values() for peer in requests}
        for peer in waiting_peers:
            self._router.send_multipart([peer, encode(ChunkPending())])

    def get_version(self, identity: WeightVersion | None) -> ServedVersion | None:
        """Return the version if it is served, else None."""
        return self._versions.get(identity) if identity is not None else None

    def in_use_since(self, identity: WeightVersion | None) -> float | None:
        """Start time of the version's oldest running fetch. None if no receiver fetches it."""
        if identity is None:
            return None
        now = self._clock()
        fetches = self._fetches.get(identity, {}).values()
        return min((fetch.started_s for fetch in fetches if self._is_running(fetch, now)), default=None)

    def serve_requests(self) -> None:
        """Answer up to `_REQUESTS_PER_CALL` requests from the socket."""
        with suppress(zmq.Again):
            for _ in range(_REQUESTS_PER_CALL):
                self.handle_message(self._router.recv_multipart(zmq.DONTWAIT))

    def handle_message(self, frames: Sequence[bytes]) -> None:
        """Handle one message from the socket."""
        peer, payload = frames[0], frames[-1]
        try:
            order = _orders.decode(payload)
        except msgspec.MsgspecError:
            return  # not one of ours; if it is, its sender repeats the request or gives up
        match order:
            case FetchDone():
                self._fetches.get(order.identity, {}).pop(peer, None)
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
            # Only a signed request protects the version's slot, so a stranger cannot block the trainer.
            now = self._clock()
            fetch = self._fetches.setdefault(identity, {}).setdefault(peer, _Fetching(now, now))
            fetch.last_request_s = now
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
        """True if the version will never arrive, because a newer one is already here."""
        return identity not in self._versions and any(identity < newer for newer in self._versions)

    def _park(self, peer: bytes, request: ChunkRequest) -> None:
        if len(self._parked) < MAX_PARKED:
            requests = self._parked.setdefault((request.identity, request.index), {})
            if len(requests) < MAX_PARKED:
                requests[peer] = request

    def _answer_parked(self, identity: WeightVersion, index: int) -> None:
        for peer, request in self._parked.pop((identity, index)).items():
            self._handle_request(peer, request)

    def _is_running(self, fetch: _Fetching, now: float) -> bool:
        return now - fetch.last_request_s < self._idle_s and now - fetch.started_s < self._max_fetch_s
