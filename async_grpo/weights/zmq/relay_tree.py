"""Who fetches from whom: the tree of receivers, and the part of the publisher that maintains it.

    publisher --> fanout receivers --> fanout each --> ...

`RelayTree` is pure. A new receiver gets the place nearest to the publisher that has room, so the depth is about
log(N) / log(fanout). Receivers move only when they must: when a relay leaves, its children get new parents and keep
their own children; a child that could not fetch from its relay gets another parent.

`RelayTracker` answers each heartbeat with the parent to fetch from, and hands out manifests. It forgets a receiver that
has been silent for a few heartbeats; its children learn their new parent from the answer to their next heartbeat.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from async_grpo.weights.zmq.messages import (
    ManifestReply,
    ManifestRequest,
    ParentAssignment,
    ReceiverHeartbeat,
    ReceiverLeaving,
    TrackerReply,
    TrackerRequest,
)
from async_grpo.weights.zmq.sockets import HEARTBEATS_OF_SILENCE, Socket, is_loopback
from async_grpo.wire import encode

ROOT = ""

_requests = msgspec.msgpack.Decoder(TrackerRequest)


@dataclass(slots=True)
class RelayNode:
    """One receiver. `relay` is the endpoint at which it serves others."""

    node: str
    host: str
    relay: str
    parent: str = ROOT
    avoids: set[str] = field(default_factory=set)


class RelayTree:
    """Receivers by node name; `ROOT` is the publisher. With `fanout` 0 all receivers are its children."""

    def __init__(self, fanout: int) -> None:
        self._fanout = fanout
        self._members: dict[str, RelayNode] = {}
        self._children: dict[str, list[str]] = {ROOT: []}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, node: str) -> bool:
        return node in self._members

    def add_receiver(self, node: str, host: str, relay: str) -> None:
        """Add a receiver. One that is known by another relay endpoint was restarted: it leaves and joins again."""
        known = self._members.get(node)
        if known is not None and known.relay == relay:
            return
        if known is not None:
            self.remove_receiver(node)
        member = RelayNode(node, host, relay)
        self._members[node] = member
        self._children[node] = []
        self._place(member)

    def remove_receiver(self, node: str) -> None:
        """Remove a receiver; its children get other parents."""
        member = self._members.pop(node)
        self._children[member.parent].remove(node)
        for orphan in self._children.pop(node):
            self._place(self._members[orphan])

    def report_failed_relay(self, node: str, relay: str) -> None:
        """`node` could not fetch from `relay`: if that is still its parent, it gets another parent."""
        member = self._members[node]
        parent = self._members.get(member.parent)
        if parent is not None and parent.relay == relay:
            member.avoids.add(relay)
            self._children[member.parent].remove(node)
            self._place(member)

    def parent_relay(self, node: str) -> str:
        """Relay endpoint of the node's parent; `ROOT` if that is the publisher."""
        parent = self._members.get(self._members[node].parent)
        return parent.relay if parent is not None else ROOT

    def children_of(self, node: str) -> list[str]:
        """The receivers that fetch from `node`."""
        return list(self._children[node])

    def _place(self, member: RelayNode) -> None:
        """Put the member under the nearest node with room; if there is none, under the publisher."""
        candidates = (node for node in self._by_distance(member.node) if self._takes(node, member))
        member.parent = next(candidates, ROOT)
        self._children[member.parent].append(member.node)

    def _by_distance(self, mover: str) -> Iterator[str]:
        """The publisher, then its children and so on, without the mover and its descendants."""
        queue = deque([ROOT])
        while queue:
            node = queue.popleft()
            yield node
            queue.extend(child for child in self._children[node] if child != mover)

    def _takes(self, node: str, member: RelayNode) -> bool:
        if self._fanout == 0 or node == ROOT:
            return node == ROOT and (self._fanout == 0 or len(self._children[ROOT]) < self._fanout)
        relay = self._members[node]
        reachable = not is_loopback(relay.relay) or relay.host == member.host
        return reachable and relay.relay not in member.avoids and len(self._children[node]) < self._fanout


class RelayTracker:
    """Answers the receivers' heartbeats and requests for manifests on the publisher's ROUTER socket."""

    def __init__(self, router: Socket, fanout: int, own_chunks: str, heartbeat_s: float) -> None:
        self._router = router
        self._tree = RelayTree(fanout)
        self._own_chunks = own_chunks
        self._silence_s = HEARTBEATS_OF_SILENCE * heartbeat_s
        self._heard_s: dict[str, float] = {}

    def count_receivers(self) -> tuple[int, int]:
        """Number of receivers, and of those that fetch from the publisher itself."""
        return len(self._tree), len(self._tree.children_of(ROOT))

    def handle_request(self, frames: Sequence[bytes], newest_manifest: Callable[[], ManifestReply]) -> None:
        """Answer one request. A request for the manifest is answered with `newest_manifest()`."""
        peer, payload = frames[0], frames[-1]
        try:
            request = _requests.decode(payload)
        except msgspec.MsgspecError:
            return  # not one of ours
        match request:
            case ReceiverHeartbeat():
                self._send(peer, self._register(request))
            case ReceiverLeaving(node=node):
                self._forget(node)
            case ManifestRequest():
                self._send(peer, newest_manifest())

    def remove_silent_receivers(self) -> None:
        """Forget receivers that have been silent for too long; called every heartbeat."""
        now = time.monotonic()
        for node, heard_s in list(self._heard_s.items()):
            if now - heard_s > self._silence_s:
                self._forget(node)

    def _send(self, peer: bytes, reply: TrackerReply) -> None:
        self._router.send_multipart([peer, encode(reply)], copy=False)

    def _register(self, heartbeat: ReceiverHeartbeat) -> ParentAssignment:
        self._heard_s[heartbeat.node] = time.monotonic()
        self._tree.add_receiver(heartbeat.node, heartbeat.host, heartbeat.relay)
        if heartbeat.suspect:
            self._tree.report_failed_relay(heartbeat.node, heartbeat.suspect)
        relay = self._tree.parent_relay(heartbeat.node)
        return ParentAssignment(parent=relay or self._own_chunks, relay=bool(relay))

    def _forget(self, node: str) -> None:
        if node in self._tree:
            self._tree.remove_receiver(node)
            del self._heard_s[node]
