"""The receiver process of a machine, ZMQ transport: fetches versions and relays them to other machines.

    publisher --announcement, manifest, parent-> PublisherConnection
    parent (publisher or relay) --chunks-> ParentConnection --> Fetch --> back slot --commit--> active slot --> engine
    other receivers <-------------chunks-- ChunkServer <----------+                        |
    rollout servers <--------Unix socket-- LocalClients <---------------"version v"--------+

The states are in `ReceiverProcess`. A failed relay (connection broken, silent for request_timeout_s, unreadable
messages, wrong chunks) is reported to the publisher, which assigns another parent. Verified chunks are kept.
"""

from __future__ import annotations

import socket
import time

import structlog
import zmq

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import WeightsCorrupt
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.node.fetch import Fetch, FetchInterrupted
from async_grpo.weights.node.local_socket import ReceiverPaths
from async_grpo.weights.node.process import ReceiverProcess, run_receiver
from async_grpo.weights.zmq.chunk_server import MAX_REQUEST_BYTES, ChunkServer
from async_grpo.weights.zmq.messages import (
    ChunkPending,
    ManifestReply,
    ManifestRequest,
    ReceiverHeartbeat,
    ReceiverLeaving,
    VersionGone,
)
from async_grpo.weights.zmq.sockets import (
    HEARTBEATS_OF_SILENCE,
    Context,
    CurveGuard,
    Socket,
    connection_count,
    is_loopback,
    keys_for,
    listen,
    reachable_endpoint,
)
from async_grpo.weights.zmq.upstream import ParentConnection, PeerUnreadable, PublisherConnection
from async_grpo.wire.board import PublisherAddress

_CHUNKS_PER_POLL = 8
"""Chunks read from a socket before the others are polled again."""
_GOODBYE_MS = 200
"""Milliseconds to send `ReceiverLeaving` at the end."""

log = structlog.get_logger()


class ZmqReceiver(ReceiverProcess):
    """Fetches from the publisher or from another receiver, and relays its chunks to others."""

    def __init__(self, paths: ReceiverPaths, config: WeightsConfig) -> None:
        """Bind the relay and the Unix socket. Raises ConfigError."""
        self._control_keys = keys_for(config)
        self._chunk_keys = self._control_keys if config.encrypt == "all" else None
        self._connections = connection_count(config)
        self._context = Context(self._connections)
        self._guard = CurveGuard(self._context, self._chunk_keys)

        self._relay: Socket = self._context.socket(zmq.ROUTER)
        self._relay.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._guard.watch_listener(self._relay)
        self._relay_endpoint = listen(self._relay, config.relay_bind, 0, self._chunk_keys, config.relay_advertise)
        self._chunk_server = ChunkServer(
            self._relay, time.monotonic, idle_s=config.request_timeout_s, max_fetch_s=config.update_timeout_s
        )

        super().__init__(paths, config, self._chunk_server)
        self._publisher: PublisherConnection | None = None
        self._parent: ParentConnection | None = None
        self._gone_at_relay: WeightVersion | None = None
        """The version that the parent, a relay, no longer serves."""

    def _connect(self, address: PublisherAddress) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._leave_parent()
        if self._config.relay_advertise is None:
            self._relay_endpoint = reachable_endpoint(address.requests, self._relay_endpoint, self._config.relay_bind)
        if self._config.fanout and is_loopback(self._relay_endpoint) and not is_loopback(address.requests):
            log.warning(
                "the trainer is on another machine, but this receiver relays on the loopback interface only, so every "
                "machine fetches from the trainer. Set weights.relay_bind to an address that other machines can reach",
                relay=self._relay_endpoint,
            )
        self._publisher = PublisherConnection(self._context, address, self._control_keys)

    def _send_heartbeat(self) -> None:
        self._report_to_publisher()
        self._chunk_server.send_pending()

    def _report_to_publisher(self, failed_relay: str = "") -> None:
        """Send the publisher a heartbeat, with the endpoint of a relay that failed if there is one."""
        if self._publisher is None:
            return
        heartbeat = ReceiverHeartbeat(
            node=self._node, host=socket.gethostname(), relay=self._relay_endpoint, suspect=failed_relay
        )
        self._publisher.send(heartbeat)

    def _newest_announced(self) -> WeightVersion | None:
        return self._publisher.announced if self._publisher is not None else None

    def _request_manifest(self, newest: WeightVersion) -> None:
        if self._publisher is not None:
            self._next_request_s = time.monotonic() + self._config.request_timeout_s
            self._publisher.send(ManifestRequest())

    def _take_manifest(self, publisher: PublisherConnection, reply: ManifestReply) -> None:
        """Start to fetch the version of a manifest reply, from the parent that is assigned now."""
        manifest = reply.manifest
        self._next_request_s = time.monotonic() + self._config.heartbeat_s
        if self._fetch is not None or manifest is None or not self._slots.is_newer(manifest.identity):
            return
        if not self._begin_fetch(manifest, self._connections):
            return

        # Change parents only between fetches: in the middle of one, all requested chunks would be requested again.
        parent = self._parent
        assignment = publisher.assignment
        if parent is not None and assignment is not None and parent.endpoint != assignment.parent:
            self._leave_parent()
        elif parent is not None and parent.is_relay and manifest.identity == self._gone_at_relay:
            self._replace_relay(parent, "it does not have the newest version")
        self._gone_at_relay = None

    def _fetch_chunks(self, fetch: Fetch, copied_chunks: list[int]) -> None:
        for index in copied_chunks:
            self._chunk_server.answer_waiting(fetch.identity, index)

        publisher = self._publisher
        if self._parent is None and publisher is not None and publisher.assignment is not None:
            self._parent = ParentConnection(
                self._context,
                publisher.assignment,
                fetch.manifest.chunk_bytes,
                self._chunk_keys,
                self._connections,
            )
        if self._parent is not None:
            self._check_parent(self._parent, fetch)
        if self._parent is not None:  # it has not failed
            self._parent.request_chunks(fetch)

    def _check_parent(self, parent: ParentConnection, fetch: Fetch) -> None:
        """Put lost requests back. Replaces a relay that is broken or silent.

        Raises FetchInterrupted if the publisher is the parent and silent.
        """
        now = time.monotonic()
        if parent.broken and parent.is_relay:
            self._replace_relay(parent, "its connection broke")
            return
        if parent.broken:
            # ZMQ reconnects to the publisher by itself, but the requests and answers in flight are lost.
            parent.broken = False
            fetch.schedule.put_back_all()

        silent_s = now - self._heard_s
        if not parent.is_relay and silent_s > HEARTBEATS_OF_SILENCE * self._config.heartbeat_s:
            raise FetchInterrupted(f"the publisher has been silent for {silent_s:.1f} s.")

        late = fetch.schedule.put_back_late(now, parent.heard_s)
        self._stats.rerequests += len(late)
        if late and parent.is_relay and now - parent.heard_s > self._config.request_timeout_s:
            self._replace_relay(parent, f"it has been silent for {now - parent.heard_s:.1f} s")

    def _interrupt(self, reason: str) -> None:
        """Change to another parent if the parent is a relay; otherwise abandon the fetch."""
        if self._parent is not None and self._parent.is_relay:
            self._replace_relay(self._parent, reason)
        else:
            super()._interrupt(reason)

    def _replace_relay(self, parent: ParentConnection, reason: str) -> None:
        """Leave a relay and report it to the publisher, which assigns another parent. Verified chunks are kept."""
        log.info("left the parent; waiting for another one", parent=parent.endpoint, reason=reason)
        self._stats.parents_lost += 1
        self._leave_parent()
        if self._fetch is not None:
            self._fetch.schedule.put_back_all()
        if self._publisher is not None:
            self._publisher.assignment = None
        self._report_to_publisher(failed_relay=parent.endpoint)

    def _leave_parent(self) -> None:
        if self._parent is not None:
            self._parent.close()
            self._parent = None

    def _commit(self, fetch: Fetch) -> None:
        super()._commit(fetch)
        if self._parent is not None:
            self._parent.finish_version(fetch.identity)
        self._report_to_publisher()

    def _send_state(self) -> None:
        self._stats.relayed_bytes = self._chunk_server.served_bytes
        self._stats.refused = self._guard.refused
        super()._send_state()

    def _wait(self) -> None:
        poller = zmq.Poller()
        sockets = [self._relay, *self._guard.sockets]
        if self._publisher is not None:
            sockets += self._publisher.sockets
        if self._parent is not None:
            sockets += self._parent.sockets
        for source in (*sockets, *self._servers.descriptors):
            poller.register(source, zmq.POLLIN)
        events = dict(poller.poll(int(self._wait_s() * 1000)))

        parent = self._parent
        if parent is not None:
            parent.check_monitors(events)
            for dealer in parent.dealers:
                # A chunk from an earlier socket may have failed the parent, which closes all its sockets.
                if dealer in events and parent is self._parent:
                    self._receive_chunks(parent, dealer)
        if self._relay in events:
            self._chunk_server.serve_requests()
        if self._publisher is not None:
            self._receive_from_publisher(self._publisher, events)
        for guard_socket in self._guard.sockets:
            if guard_socket in events:
                self._guard.handle_event(guard_socket)
        for descriptor in self._servers.descriptors:
            if descriptor in events:
                self._servers.handle_readable(descriptor)

    def _receive_from_publisher(self, publisher: PublisherConnection, events: dict[object, int]) -> None:
        if publisher.announcements in events:
            before = publisher.announced
            publisher.receive_announcement()
            self._heard_s = time.monotonic()
            if publisher.announced != before:
                self._next_request_s = 0.0  # a new version: request its manifest immediately
        if publisher.requests in events:
            reply = publisher.receive_reply()
            self._heard_s = time.monotonic()
            if reply is not None:
                self._take_manifest(publisher, reply)

    def _receive_chunks(self, parent: ParentConnection, dealer: Socket) -> None:
        """Handle up to `_CHUNKS_PER_POLL` answers. Raises PeerUnreadable, WeightsCorrupt if the parent is no relay."""
        for _ in range(_CHUNKS_PER_POLL):
            fetch = self._fetch
            try:
                answer = parent.receive_answer(dealer)
            except PeerUnreadable as error:
                if not parent.is_relay:
                    raise
                self._replace_relay(parent, str(error))
                return
            if answer is None or fetch is None:  # nothing has arrived, or it answers a fetch that has ended
                return

            reply, payload = answer
            if isinstance(reply, ChunkPending):
                continue  # the parent sends the chunk when it has it; the request stays open
            if isinstance(reply, VersionGone):
                # Usually there is a newer version. So ask for the manifest again: if it still names this version, the
                # relay is at fault, and `_take_manifest` replaces it.
                if reply.identity == fetch.identity:
                    self._gone_at_relay = fetch.identity if parent.is_relay else None
                    self._drop_fetch()
                    return
                continue

            self._stats.received_bytes += len(payload)
            try:
                if reply.identity == fetch.identity and fetch.accept_chunk(reply.index, payload, patch=reply.patch):
                    self._chunk_server.answer_waiting(fetch.identity, reply.index)
            except WeightsCorrupt:
                if not parent.is_relay:
                    raise
                self._replace_relay(parent, "its chunks fail their hashes")
                return
            parent.request_chunks(fetch)  # keep the pipeline full: a credit is free now

    def _close(self) -> None:
        if self._publisher is not None:
            self._publisher.send(ReceiverLeaving(node=self._node))
            self._publisher.requests.close(_GOODBYE_MS)
            self._publisher.close()
        self._leave_parent()
        self._context.destroy(_GOODBYE_MS)


if __name__ == "__main__":
    run_receiver(ZmqReceiver)
