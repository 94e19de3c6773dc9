"""Assigns receivers to parents: the relay tree, and the publisher's part that maintains it.

    publisher --> fanout receivers --> fanout receivers each --> ...

`RelayTree` is pure. A new receiver becomes a child of the node nearest to the publisher that has room, so the depth is
about log(N) / log(fanout). Receivers move only when they must: if a relay leaves, its children get new parents and keep
their own children; a child that cannot fetch from its relay gets another parent.

`RelayTracker` answers each heartbeat with the parent to fetch from, and sends manifests. It removes a receiver that has
been silent for a few heartbeats; the receiver's children get their new parent with the answer to their next heartbeat.
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
"""Node name of the publisher."""

_requests = msgspec.msgpack.Decoder(TrackerRequest)


@dataclass(slots=True)
class RelayNode:
    """One receiver in the tree."""

    node: str
    host: str
    relay: str
    """Endpoint where it serves others."""
    parent: str = ROOT
    failed_relays: set[str] = field(default_factory=set)
    """Relays from which it could not fetch."""


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
        """Add a receiver. Does nothing if it is there; a changed relay endpoint means that it was restarted."""
        existing = self._members.get(node)
        if existing is not None and existing.relay == relay:
            return
        if existing is not None:
            self.remove_receiver(node)
        member = RelayNode(node, host, relay)
        self._members[node] = member
        self._children[node] = []
        self._place(member)

    def remove_receiver(self, node: str) -> None:
        """Remove a receiver and assign its children to other parents."""
        member = self._members.pop(node)
        self._children[member.parent].remove(node)
        for orphan in self._children.pop(node):
            self._place(self._members[orphan])

    def report_failed_relay(self, node: str, relay: str) -> None:
        """Assign another parent to `node`, which could not fetch from `relay`.

        Does nothing if `relay` is no longer its parent: the report crossed with a new assignment.
        """
        member = self._members[node]
        parent = self._members.get(member.parent)
        if parent is not None and parent.relay == relay:
            member.failed_relays.add(relay)
            self._children[member.parent].remove(node)
            self._place(member)

    def parent_relay(self, node: str) -> str:
        """Relay endpoint of the node's parent; `ROOT` if its parent is the publisher."""
        parent = self._members.get(self._members[node].parent)
        return parent.relay if parent is not None else ROOT

    def children_of(self, node: str) -> list[str]:
        """Receivers that fetch from `node`."""
        return list(self._children[node])

    def _place(self, member: RelayNode) -> None:
        """Make the member a child of the nearest node with room, or of the publisher if there is none."""
        candidates = (node for node in self._nodes_by_depth(member.node) if self._can_be_parent(node, member))
        member.parent = next(candidates, ROOT)
        self._children[member.parent].append(member.node)

    def _nodes_by_depth(self, excluded: str) -> Iterator[str]:
        """Yield all nodes breadth-first, except `excluded` and its descendants: they would form a cycle."""
        queue = deque([ROOT])
        while queue:
            node = queue.popleft()
            yield node
            queue.extend(child for child in self._children[node] if child != excluded)

    def _can_be_parent(self, node: str, member: RelayNode) -> bool:
        if self._fanout == 0:  # no relaying
            return node == ROOT
        has_room = len(self._children[node]) < self._fanout
        if node == ROOT:
            return has_room

        relay = self._members[node]
        is_reachable = not is_loopback(relay.relay) or relay.host == member.host
        return has_room and is_reachable and relay.relay not in member.failed_relays


class RelayTracker:
    """Answers receivers' heartbeats and manifest requests on the publisher's ROUTER socket."""

    def __init__(self, router: Socket, fanout: int, publisher_chunks: str, heartbeat_s: float) -> None:
        """`publisher_chunks` is the endpoint where the publisher itself serves chunks."""
        self._router = router
        self._tree = RelayTree(fanout)
        self._publisher_chunks = publisher_chunks
        self._silence_s = HEARTBEATS_OF_SILENCE * heartbeat_s
        self._heard_s: dict[str, float] = {}

    def count_receivers(self) -> tuple[int, int]:
        """Number of receivers, and number of those that fetch directly from the publisher."""
        return len(self._tree), len(self._tree.children_of(ROOT))

    def handle_request(self, frames: Sequence[bytes], newest_manifest: Callable[[], ManifestReply]) -> None:
        """Answer one request. `newest_manifest` is called only for a manifest request."""
        peer, payload = frames[0], frames[-1]
        try:
            request = _requests.decode(payload)
        except msgspec.MsgspecError:
            return  # not one of ours
        match request:
            case ReceiverHeartbeat():
                self._send(peer, self._register(request))
            case ReceiverLeaving(node=node):
                self._remove(node)
            case ManifestRequest():
                self._send(peer, newest_manifest())

    def remove_silent_receivers(self) -> None:
        """Remove receivers that have been silent for HEARTBEATS_OF_SILENCE. Called every heartbeat."""
        now = time.monotonic()
        for node, heard_s in list(self._heard_s.items()):
            if now - heard_s > self._silence_s:
                self._remove(node)

    def _send(self, peer: bytes, reply: TrackerReply) -> None:
        self._router.send_multipart([peer, encode(reply)], copy=False)

    def _register(self, heartbeat: ReceiverHeartbeat) -> ParentAssignment:
        self._heard_s[heartbeat.node] = time.monotonic()
        self._tree.add_receiver(heartbeat.node, heartbeat.host, heartbeat.relay)
        if heartbeat.suspect:
            self._tree.report_failed_relay(heartbeat.node, heartbeat.suspect)
        relay = self._tree.parent_relay(heartbeat.node)
        if relay == ROOT:
            return ParentAssignment(parent=self._publisher_chunks, relay=False)
        return ParentAssignment(parent=relay, relay=True)

    def _remove(self, node: str) -> None:
        if node in self._tree:
            self._tree.remove_receiver(node)
            del self._heard_s[node]
