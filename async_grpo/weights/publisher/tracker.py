"""Knows the receivers: takes their heartbeats, tells each from whom to fetch, hands out manifests.

Whoever was silent for a few heartbeats is forgotten, and its children are put elsewhere; they learn
of it by the answer to their own next heartbeat.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from async_grpo.weights.manifest import Identity
from async_grpo.weights.messages import Assignment, Beat, Leave, ManifestRequest, TrackerRequest
from async_grpo.weights.publisher.tree import ROOT, Tree
from async_grpo.weights.sockets import HEARTBEATS_OF_SILENCE, Socket
from async_grpo.wire import encode

_requests = msgspec.msgpack.Decoder(TrackerRequest)


class Tracker:
    """The publisher's control plane; answers on the ROUTER socket that it is given."""

    def __init__(self, router: Socket, fanout: int, own_chunks: str, heartbeat_s: float) -> None:
        self._router = router
        self._tree = Tree(fanout)
        self._own_chunks = own_chunks
        self._silence_s = HEARTBEATS_OF_SILENCE * heartbeat_s
        self._heard_s: dict[str, float] = {}
        self._held: dict[str, Identity | None] = {}

    @property
    def receivers(self) -> int:
        """How many there are."""
        return len(self._tree)

    @property
    def direct_receivers(self) -> int:
        """Of them, children of the publisher."""
        return len(self._tree.children_of(ROOT))

    def most_behind(self, newest: Identity) -> int:
        """Versions that the receiver with the oldest weights lacks; one without any, or of an older epoch, has 0."""
        held = [identity for identity in self._held.values() if identity is not None and identity.epoch == newest.epoch]
        return max((newest.version - identity.version for identity in held), default=0)

    def handle(self, frames: Sequence[bytes], manifest: bytes) -> None:
        """Answer one request; `manifest` is the encoded reply to those who ask for it."""
        peer, payload = frames[0], frames[-1]
        try:
            request = _requests.decode(payload)
        except msgspec.MsgspecError:
            return  # not one of ours
        match request:
            case Beat():
                self._router.send_multipart([peer, encode(self._register(request))])
            case Leave(node=node):
                self._forget(node)
            case ManifestRequest():
                self._router.send_multipart([peer, manifest], copy=False)

    def forget_silent(self) -> None:
        """Called every heartbeat."""
        now = time.monotonic()
        for node, heard_s in list(self._heard_s.items()):
            if now - heard_s > self._silence_s:
                self._forget(node)

    def _register(self, beat: Beat) -> Assignment:
        self._heard_s[beat.node] = time.monotonic()
        self._held[beat.node] = Identity(*beat.held) if beat.held else None
        self._tree.join(beat.node, beat.host, beat.relay)
        if beat.suspect:
            self._tree.suspect(beat.node, beat.suspect)
        relay = self._tree.parent_of(beat.node)
        return Assignment(parent=relay or self._own_chunks, relay=bool(relay))

    def _forget(self, node: str) -> None:
        if node in self._tree:
            self._tree.leave(node)
            del self._heard_s[node], self._held[node]
