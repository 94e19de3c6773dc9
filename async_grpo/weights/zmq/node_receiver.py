"""The receiver process of a machine, which all rollout servers of a run on that machine share.

    publisher --announcement, manifest, parent-> PublisherConnection
    parent (publisher or relay) --chunks-> ParentConnection --> Fetch --> back slot --commit--> active slot --> engine
    other receivers <-------------chunks-- ChunkServer <----------+                        |
    rollout servers <--------Unix socket-- LocalClients <---------------"version v"--------+

One thread owns every socket and waits in one poller. What each part waits for:

- A fetch begins when a version is announced, the back slot is free (no engine loads from it and no receiver fetches
  from it; both are bounded in time), and the manifest has arrived. With one slot, every server has taken what is in it.
- It ends with the last verified chunk. A newer announcement does not end it: the newer version is fetched next. So a
  receiver that is slower than the trainer skips versions, but completes every fetch that it begins.
- A parent that is lost (connection broken, silent for request_timeout_s, or of a release that cannot be read) is
  reported to the publisher, which assigns another. Chunks that have arrived stay.
- The process ends when no server is connected any more.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import structlog
import zmq
from msgspec.structs import replace

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import AsyncGrpoError, WeightsCorrupt
from async_grpo.weights.manifest import WeightManifest, WeightVersion
from async_grpo.weights.node.fetch import Fetch, FetchInterrupted
from async_grpo.weights.node.local_socket import Failed, LocalClients, ReceiverPaths, ReceiverState
from async_grpo.weights.node.records import ReceiverStats
from async_grpo.weights.node.slots import StoreSlots
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
    CurveKeys,
    Socket,
    as_seen_from,
    connections,
    is_loopback,
    keys_for,
    listen,
)
from async_grpo.weights.zmq.upstream import ParentConnection, PeerUnreadable, PublisherConnection

FIRST_SERVER_S = 5.0
_DRAIN = 8
_GOODBYE_MS = 200

log = structlog.get_logger()


class NodeReceiver:
    """The receiver's loop. `run` returns when no rollout server is connected any more."""

    def __init__(self, paths: ReceiverPaths, config: WeightsConfig, keys: CurveKeys | None) -> None:
        self._paths = paths
        self._config = config
        self._control_keys, self._chunk_keys = keys, keys if config.encrypt == "all" else None
        self._stats = ReceiverStats()
        self._connections = connections(config)
        self._context = Context(self._connections)
        self._guard = CurveGuard(self._context, self._chunk_keys)
        self._relay: Socket = self._context.socket(zmq.ROUTER)
        self._relay.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._guard.watch(self._relay)
        self._relay_endpoint = listen(self._relay, config.relay_bind, 0, self._chunk_keys, config.relay_advertise)
        self._server = ChunkServer(
            self._relay, time.monotonic, idle_s=config.request_timeout_s, longest_s=config.update_timeout_s
        )
        self._locals = LocalClients(paths.socket, config.update_timeout_s)
        self._slots = StoreSlots(paths.store, config, self._server, self._locals, self._stats)
        self._host = socket.gethostname()
        self._node = f"{self._host}-{os.getpid()}-{os.urandom(4).hex()}"
        self._publisher: PublisherConnection | None = None
        self._parent: ParentConnection | None = None
        self._fetch: Fetch | None = None
        self._gone_at_relay: WeightVersion | None = None
        self._next_heartbeat_s = self._ask_manifest_s = 0.0
        self._started_s = time.monotonic()

    def run(self) -> None:
        """Receive until every server has left. Tells the servers of an error that ends it, and raises it."""
        try:
            while not self._is_unused():
                self._follow()
                self._heartbeat_if_due()
                self._advance()
                self._wait()
        except AsyncGrpoError as error:
            self._locals.tell_all(Failed(message=str(error), corrupt=isinstance(error, WeightsCorrupt)))
            raise
        finally:
            self._close()

    def _is_unused(self) -> bool:
        if len(self._locals):
            return False
        return self._locals.had_servers or time.monotonic() - self._started_s > FIRST_SERVER_S

    def _follow(self) -> None:
        """Connect to the publisher of the newest epoch that the servers have found."""
        address = self._locals.address
        if address is None or (self._publisher is not None and self._publisher.address == address):
            return
        if self._publisher is not None:
            self._publisher.close()
            self._leave_parent()
            self._interrupt()
        if self._config.relay_advertise is None:
            self._relay_endpoint = as_seen_from(address.requests, self._relay_endpoint, self._config.relay_bind)
        if self._config.fanout and is_loopback(self._relay_endpoint) and not is_loopback(address.requests):
            log.warning(
                "the trainer is on another machine, but this receiver relays on the loopback only: every machine "
                "fetches from the trainer. Set weights.relay_bind",
                relay=self._relay_endpoint,
            )
        self._publisher = PublisherConnection(self._context, address, self._control_keys)
        self._next_heartbeat_s = self._ask_manifest_s = 0.0

    def _heartbeat_if_due(self) -> None:
        now = time.monotonic()
        if now < self._next_heartbeat_s:
            return
        self._next_heartbeat_s = now + self._config.heartbeat_s
        self._send_heartbeat()
        self._server.reassure()
        self._tell_servers()

    def _send_heartbeat(self, suspect: str = "") -> None:
        if self._publisher is not None:
            relay = self._relay_endpoint
            self._publisher.send(ReceiverHeartbeat(node=self._node, host=self._host, relay=relay, suspect=suspect))

    def _advance(self) -> None:
        """Do one step of the work that needs no waiting."""
        if self._publisher is None:
            return
        if self._fetch is None:
            self._ask_for_manifest(self._publisher)
            return
        try:
            self._advance_fetch(self._publisher, self._fetch)
        except FetchInterrupted as error:
            if self._parent is not None and self._parent.is_relay:
                self._lose_parent(str(error))
            else:
                log.info("a fetch was given up", reason=str(error))
                self._interrupt()

    def _ask_for_manifest(self, publisher: PublisherConnection) -> None:
        now = time.monotonic()
        if not self._slots.is_news(publisher.announced) or now < self._ask_manifest_s:
            return
        if self._slots.slot_in_use():
            return
        self._ask_manifest_s = now + self._config.request_timeout_s
        publisher.send(ManifestRequest())

    def _take_manifest(self, reply: ManifestReply) -> None:
        manifest = reply.manifest
        self._ask_manifest_s = time.monotonic() + self._config.heartbeat_s
        if self._fetch is None and manifest is not None and self._slots.is_news(manifest.identity):
            self._begin(manifest)

    def _begin(self, manifest: WeightManifest) -> None:
        assert self._publisher is not None
        manifest.validate()
        self._slots.open(manifest)
        self._publisher.heard_s = time.monotonic()  # making a store takes seconds, and no socket was read meanwhile
        if not self._slots.is_news(manifest.identity):  # the store of an earlier receiver has this version
            self._tell_servers()
            return
        if self._slots.slot_in_use():
            self._ask_manifest_s = 0.0
            return
        assignment = self._publisher.assignment
        if self._parent is not None and assignment is not None and self._parent.endpoint != assignment.parent:
            self._leave_parent()  # the tree has changed since the last version
        if manifest.identity == self._gone_at_relay and self._parent is not None and self._parent.is_relay:
            self._lose_parent("it does not have the newest version")
        self._gone_at_relay = None
        self._fetch = self._slots.begin(manifest, self._connections)

    def _advance_fetch(self, publisher: PublisherConnection, fetch: Fetch) -> None:
        now = time.monotonic()
        if now - fetch.started_s > self._config.update_timeout_s:
            raise FetchInterrupted(
                f"{fetch.identity} did not come whole in {self._config.update_timeout_s:g} s. Raise "
                "weights.update_timeout_s if this repeats."
            )
        if fetch.has_copies:
            for index in fetch.copy_unchanged():
                self._server.arrived(fetch.identity, index)
        if self._parent is None and publisher.assignment is not None:
            self._parent = ParentConnection(
                self._context, publisher.assignment, fetch.manifest.chunk_bytes, self._chunk_keys, self._connections
            )
        if self._parent is not None:
            self._check_parent(publisher, self._parent, fetch, now)
        if self._parent is not None:
            for request in fetch.requests(now):
                self._parent.ask(request)
        if fetch.done:
            self._commit(fetch)

    def _check_parent(self, publisher: PublisherConnection, parent: ParentConnection, fetch: Fetch, now: float) -> None:
        if parent.broken and parent.is_relay:
            self._lose_parent("its connection broke")
            return
        if parent.broken:  # the publisher: ZMQ connects again by itself
            parent.broken = False
            fetch.schedule.restart()
        if not parent.is_relay and now - publisher.heard_s > HEARTBEATS_OF_SILENCE * self._config.heartbeat_s:
            raise FetchInterrupted(f"{publisher.address.announce} has been silent for {now - publisher.heard_s:.1f} s.")
        late = fetch.schedule.expire(now, parent.heard_s)
        self._stats.rerequests += len(late)
        if late and parent.is_relay and now - parent.heard_s > self._config.request_timeout_s:
            self._lose_parent(f"it has been silent for {now - parent.heard_s:.1f} s")

    def _lose_parent(self, reason: str) -> None:
        """Report the parent to the publisher, which names another; the chunks that are here stay."""
        assert self._parent is not None
        log.info("fetching from another parent", parent=self._parent.endpoint, reason=reason)
        self._stats.parents_lost += 1
        suspect = self._parent.endpoint
        self._leave_parent()
        if self._fetch is not None:
            self._fetch.schedule.restart()
        if self._publisher is not None:
            self._publisher.assignment = None
        self._send_heartbeat(suspect)

    def _leave_parent(self) -> None:
        if self._parent is not None:
            self._parent.close()
            self._parent = None

    def _commit(self, fetch: Fetch) -> None:
        before, took_s = self._slots.last, time.monotonic() - fetch.started_s
        self._slots.commit(fetch)
        self._fetch = None
        self._ask_manifest_s = 0.0
        stats = self._stats
        stats.versions += 1
        stats.dense_bytes += fetch.manifest.layout.total_bytes
        stats.last_transfer_s = took_s
        if before is not None and before.epoch == fetch.identity.epoch:
            stats.skipped += fetch.identity.version - before.version - 1
        if self._parent is not None:
            self._parent.end(fetch.identity)
        self._send_heartbeat()
        self._tell_servers()

    def _interrupt(self) -> None:
        """Drop the fetch, and ask for the newest manifest."""
        if self._fetch is not None:
            self._slots.abandon(self._fetch)
            self._fetch = None
            self._stats.interrupted += 1
            self._ask_manifest_s = 0.0

    def _tell_servers(self) -> None:
        publisher, stats = self._publisher, self._stats
        stats.relayed_bytes, stats.refused = self._server.served_bytes, self._guard.refused
        state = ReceiverState(newest=self._slots.newest, servers=len(self._locals), stats=stats)
        if publisher is not None:
            address, silent_s = publisher.address, time.monotonic() - publisher.heard_s
            state = replace(state, publisher=address.announce, epoch=address.epoch, silent_s=silent_s)
        self._locals.tell_all(state)

    def _wait(self) -> None:
        """Wait for a socket, a deadline or the next heartbeat, and handle what came."""
        poller = zmq.Poller()
        sockets = [self._relay, *self._guard.sockets]
        sockets += self._publisher.sockets if self._publisher is not None else []
        sockets += self._parent.sockets if self._parent is not None else []
        for waited_for in (*sockets, *self._locals.descriptors):
            poller.register(waited_for, zmq.POLLIN)
        events = dict(poller.poll(self._poll_timeout_ms()))
        for dealer in self._parent.ready(events) if self._parent is not None else []:
            if self._parent is not None:  # the chunks of another may have ended it
                self._take_chunks(self._parent, dealer)
        if self._relay in events:
            self._server.serve()
        if self._publisher is not None and self._publisher.announcements in events:
            self._take_announcement(self._publisher)
        if self._publisher is not None and self._publisher.requests in events:
            self._publisher.receive(self._take_manifest)
        for guarded in self._guard.sockets:
            if guarded in events:
                self._guard.handle(guarded)
        for descriptor in self._locals.descriptors:
            if descriptor in events:
                self._locals.handle(descriptor)

    def _poll_timeout_ms(self) -> int:
        if self._fetch is not None and self._fetch.has_copies:
            return 0
        return max(1, int((self._next_heartbeat_s - time.monotonic()) * 1000))

    def _take_announcement(self, publisher: PublisherConnection) -> None:
        before = publisher.announced
        publisher.hear()
        if publisher.announced != before:
            self._ask_manifest_s = 0.0

    def _take_chunks(self, parent: ParentConnection, dealer: Socket) -> None:
        for _ in range(_DRAIN):
            fetch = self._fetch
            try:
                received = parent.receive(dealer)
            except PeerUnreadable as error:
                if not parent.is_relay:
                    raise
                self._lose_parent(str(error))
                return
            if received is None or fetch is None:
                return
            reply, payload = received
            if isinstance(reply, ChunkPending):
                continue
            if isinstance(reply, VersionGone):
                if reply.identity == fetch.identity:
                    self._gone_at_relay = fetch.identity if parent.is_relay else None
                    self._interrupt()
                    return
            else:
                self._stats.received_bytes += len(payload)
                try:
                    if fetch.accept(reply, payload):
                        self._server.arrived(fetch.identity, reply.index)
                except WeightsCorrupt:
                    if not parent.is_relay:
                        raise
                    self._lose_parent("its chunks fail their hashes")
                    return
                for request in fetch.requests(time.monotonic()):
                    parent.ask(request)

    def _close(self) -> None:
        self._locals.close()
        self._slots.close()
        if self._publisher is not None:
            self._publisher.send(ReceiverLeaving(node=self._node))
            self._publisher.requests.close(_GOODBYE_MS)
            self._publisher.close()
        self._leave_parent()
        self._context.destroy(_GOODBYE_MS)
        self._paths.remove_lock()  # last: from now on another receiver may start


def main(store: str, config_json: str) -> None:
    """Entry point of the process; started by a rollout server, which passes on its lock."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the servers handle them, and this process ends with the servers
        signal.signal(number, signal.SIG_IGN)
    config = WeightsConfig.model_validate_json(config_json)
    NodeReceiver(ReceiverPaths(Path(store)), config, keys_for(config)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
