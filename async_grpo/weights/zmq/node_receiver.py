"""The receiver of a machine: one process that every rollout server of a run on it shares.

    publisher --announcement, manifest, parent-> PublisherConnection
    parent (publisher or relay) --chunks-------> Source --> Fetch --> back slot --commit--> active slot --mmap--> engine
    other receivers <-------------chunks-------- ChunkServer <----------+                        |
    rollout servers <-------------Unix socket--- LocalClients <---------------"version v"--------+

One thread owns every socket and waits in one poller. What each thing waits for:

- a fetch begins when a version is announced, nobody needs the back slot any more (an engine that
  loads from it: until it says so; a receiver that fetches from it: until it is done; both bounded),
  and the manifest is there
- it ends with the last verified chunk. A newer announcement does not end it: the newer version is
  next, so fast publications are skipped and none is fetched in vain for ever
- a parent that is lost (connection broken, or silent for request_timeout_s) is reported to the
  publisher, which names another; the chunks that are here stay
- it all ends when no server is connected any more
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import time
from pathlib import Path

import structlog
import zmq

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import AsyncGrpoError, WeightsCorrupt
from async_grpo.weights.manifest import WeightManifest, WeightVersion
from async_grpo.weights.zmq.chunk_server import MAX_REQUEST_BYTES, ChunkServer
from async_grpo.weights.zmq.fetch import Fetch, FetchInterrupted
from async_grpo.weights.zmq.local_socket import Failed, LocalClients, ReceiverPaths, ReceiverState
from async_grpo.weights.zmq.messages import (
    ChunkPending,
    FetchDone,
    ManifestRequest,
    ReceiverHeartbeat,
    ReceiverLeaving,
    ReceiverStats,
    VersionGone,
)
from async_grpo.weights.zmq.slots import StoreSlots
from async_grpo.weights.zmq.sockets import (
    HEARTBEATS_OF_SILENCE,
    Context,
    CurveGuard,
    CurveKeys,
    Socket,
    as_seen_from,
    is_loopback,
    keys_for,
    listen,
)
from async_grpo.weights.zmq.upstream import ParentConnection, PublisherConnection

FIRST_SERVER_S = 5.0
_DRAIN = 8
_GOODBYE_MS = 200

log = structlog.get_logger()


class NodeReceiver:
    """The loop. `run` returns when nobody needs this process any more."""

    def __init__(self, place: ReceiverPaths, config: WeightsConfig, keys: CurveKeys | None) -> None:
        self._config = config
        self._control_keys, self._chunk_keys = keys, keys if config.encrypt == "all" else None
        self._stats = ReceiverStats()
        self._context = Context()
        self._guard = CurveGuard(self._context, self._chunk_keys)
        self._relay: Socket = self._context.socket(zmq.ROUTER)
        self._relay.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._guard.watch(self._relay)
        self._relay_endpoint = listen(self._relay, config.relay_bind, 0, self._chunk_keys, config.relay_advertise)
        self._server = ChunkServer(
            self._relay, time.monotonic, idle_s=config.request_timeout_s, longest_s=config.update_timeout_s
        )
        self._locals = LocalClients(place.socket, config.update_timeout_s)
        self._keeper = StoreSlots(place.store, config, self._server, self._locals, self._stats)
        self._host = socket.gethostname()
        self._node = f"{self._host}-{os.getpid()}-{os.urandom(4).hex()}"
        self._uplink: PublisherConnection | None = None
        self._source: ParentConnection | None = None
        self._fetch: Fetch | None = None
        self._gone_at_relay: WeightVersion | None = None
        self._next_beat_s = self._ask_manifest_s = 0.0
        self._blocked_s: float | None = None
        self._started_s = time.monotonic()

    def run(self) -> None:
        """Until every server has left. Raises what makes it impossible to go on, after telling the servers."""
        try:
            while not self._is_needless():
                self._follow()
                self._beat_if_due()
                self._advance()
                self._wait()
        except AsyncGrpoError as error:
            self._locals.tell_all(Failed(message=str(error), corrupt=isinstance(error, WeightsCorrupt)))
            raise
        finally:
            self._close()

    def _is_needless(self) -> bool:
        if len(self._locals):
            return False
        return self._locals.had_servers or time.monotonic() - self._started_s > FIRST_SERVER_S

    def _follow(self) -> None:
        """The publisher of the newest epoch that the servers have found."""
        address = self._locals.address
        if address is None or (self._uplink is not None and self._uplink.address == address):
            return
        if self._uplink is not None:
            self._uplink.close()
            self._leave_source()
            self._interrupt()
        if self._config.relay_advertise is None:
            self._relay_endpoint = as_seen_from(address.requests, self._relay_endpoint, self._config.relay_bind)
        if self._config.fanout and is_loopback(self._relay_endpoint) and not is_loopback(address.requests):
            log.warning(
                "the trainer is on another machine, but this receiver relays on the loopback only: every machine "
                "fetches from the trainer. Set weights.relay_bind",
                relay=self._relay_endpoint,
            )
        self._uplink = PublisherConnection(self._context, address, self._control_keys)
        self._next_beat_s = self._ask_manifest_s = 0.0

    def _beat_if_due(self) -> None:
        now = time.monotonic()
        if now < self._next_beat_s:
            return
        self._next_beat_s = now + self._config.heartbeat_s
        self._beat()
        self._server.reassure()
        self._tell_servers()

    def _beat(self, suspect: str = "") -> None:
        if self._uplink is not None:
            held = self._keeper.newest
            self._uplink.send(
                ReceiverHeartbeat(
                    node=self._node, host=self._host, relay=self._relay_endpoint, held=held, suspect=suspect
                )
            )

    def _advance(self) -> None:
        """One step of whatever can be done without waiting."""
        if self._uplink is None:
            return
        if self._fetch is None:
            self._ask_for_manifest(self._uplink)
            return
        try:
            self._advance_fetch(self._uplink, self._fetch)
        except FetchInterrupted as error:
            if self._source is not None and self._source.is_relay:
                self._lose_source(str(error))
            else:
                log.info("a fetch was given up", reason=str(error))
                self._interrupt()

    def _ask_for_manifest(self, uplink: PublisherConnection) -> None:
        now = time.monotonic()
        if not self._keeper.is_news(uplink.announced) or now < self._ask_manifest_s:
            return
        if self._keeper.slot_in_use():
            self._blocked_s = self._blocked_s or now
            return
        if self._blocked_s is not None:
            self._stats.slot_wait_s += now - self._blocked_s
            self._blocked_s = None
        self._ask_manifest_s = now + self._config.request_timeout_s
        uplink.send(ManifestRequest())

    def _take_manifest(self, manifest: WeightManifest | None) -> None:
        self._ask_manifest_s = time.monotonic() + self._config.heartbeat_s
        if self._fetch is not None or manifest is None or not self._keeper.is_news(manifest.identity):
            return
        assert self._uplink is not None
        manifest.validate()
        self._keeper.open(manifest)
        self._uplink.heard_s = time.monotonic()  # making a store takes seconds, in which nothing was listened to
        if not self._keeper.is_news(manifest.identity):  # the store of an earlier receiver has it already
            self._tell_servers()
            return
        if self._keeper.slot_in_use():
            self._ask_manifest_s = 0.0
            return
        assignment = self._uplink.assignment
        if self._source is not None and assignment is not None and self._source.endpoint != assignment.parent:
            self._leave_source()  # the tree has changed since the last version
        if manifest.identity == self._gone_at_relay and self._source is not None and self._source.is_relay:
            self._lose_source("it does not have the newest version")
        self._gone_at_relay = None
        self._fetch = self._keeper.begin(manifest)

    def _advance_fetch(self, uplink: PublisherConnection, fetch: Fetch) -> None:
        now = time.monotonic()
        if now - fetch.started_s > self._config.update_timeout_s:
            raise FetchInterrupted(
                f"{fetch.identity} did not come whole in {self._config.update_timeout_s:g} s. Raise "
                "weights.update_timeout_s if this repeats."
            )
        if fetch.has_copies:
            for index in fetch.copy_unchanged():
                self._server.arrived(fetch.identity, index)
        if self._source is None and uplink.assignment is not None:
            self._source = ParentConnection(
                self._context, uplink.assignment, fetch.manifest.chunk_bytes, self._chunk_keys
            )
        if self._source is not None:
            self._check_source(uplink, self._source, fetch, now)
        if self._source is not None:
            for request in fetch.requests(now):
                self._source.ask(request)
        if fetch.done:
            self._commit(fetch)

    def _check_source(self, uplink: PublisherConnection, source: ParentConnection, fetch: Fetch, now: float) -> None:
        if source.broken and source.is_relay:
            self._lose_source("its connection broke")
            return
        if source.broken:  # the publisher: ZMQ connects again by itself
            source.broken = False
            fetch.plan.restart()
        if not source.is_relay and now - uplink.heard_s > HEARTBEATS_OF_SILENCE * self._config.heartbeat_s:
            raise FetchInterrupted(f"{uplink.address.announce} has been silent for {now - uplink.heard_s:.1f} s.")
        late = fetch.plan.expire(now, source.heard_s)
        self._stats.rerequests += len(late)
        if late and source.is_relay and now - source.heard_s > self._config.request_timeout_s:
            self._lose_source(f"it has been silent for {now - source.heard_s:.1f} s")

    def _lose_source(self, reason: str) -> None:
        """Go on from another parent, with the chunks that are here."""
        assert self._source is not None
        log.info("fetching from another parent", parent=self._source.endpoint, reason=reason)
        self._stats.parents_lost += 1
        suspect = self._source.endpoint
        self._leave_source()
        if self._fetch is not None:
            self._fetch.plan.restart()
        if self._uplink is not None:
            self._uplink.assignment = None
        self._beat(suspect)

    def _leave_source(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None

    def _commit(self, fetch: Fetch) -> None:
        before, took_s = self._keeper.newest, time.monotonic() - fetch.started_s
        self._keeper.commit(fetch)
        self._fetch = None
        self._ask_manifest_s = 0.0
        stats = self._stats
        stats.versions += 1
        stats.dense_bytes += fetch.manifest.layout.total_bytes
        stats.transfer_s += took_s
        stats.last_transfer_s = took_s
        if before is not None and before.epoch == fetch.identity.epoch:
            stats.skipped += fetch.identity.version - before.version - 1
        if self._source is not None:
            self._source.ask(FetchDone(epoch=fetch.identity.epoch, version=fetch.identity.version))
        self._beat()
        self._tell_servers()

    def _interrupt(self) -> None:
        """What was fetched in part is forgotten; the newest manifest is asked for."""
        if self._fetch is not None:
            self._keeper.abandon(self._fetch)
            self._fetch = None
            self._stats.interrupted += 1
            self._ask_manifest_s = 0.0

    def _tell_servers(self) -> None:
        uplink, newest, stats = self._uplink, self._keeper.newest, self._stats
        stats.relayed_bytes, stats.refused = self._server.served_bytes, self._guard.refused
        announced = uplink.announced if uplink is not None else None
        if announced is not None and newest is not None and announced.epoch == newest.epoch:
            stats.versions_behind = max(0, announced.version - newest.version)
        self._locals.tell_all(
            ReceiverState(
                newest=newest,
                publisher=uplink.address.announce if uplink is not None else "",
                epoch=uplink.address.epoch if uplink is not None else -1,
                silent_s=time.monotonic() - uplink.heard_s if uplink is not None else 0.0,
                servers=len(self._locals),
                stats=stats,
            )
        )

    def _wait(self) -> None:
        """For a socket, a deadline or the next heartbeat; then deal with what came."""
        poller = zmq.Poller()
        sockets = [self._relay, *self._guard.sockets]
        sockets += self._uplink.sockets if self._uplink is not None else []
        sockets += self._source.sockets if self._source is not None else []
        for waited_for in (*sockets, *self._locals.descriptors):
            poller.register(waited_for, zmq.POLLIN)
        events = dict(poller.poll(self._patience_ms()))
        if self._source is not None and self._source.dealer in events:
            self._take_chunks(self._source)
        if self._relay in events:
            self._serve_relay()
        if self._uplink is not None and self._uplink.announcements in events:
            self._hear(self._uplink)
        if self._uplink is not None and self._uplink.requests in events:
            self._uplink.receive(self._take_manifest)
        if self._source is not None and self._source.monitor in events:
            self._source.watch()
        for guarded in self._guard.sockets:
            if guarded in events:
                self._guard.handle(guarded)
        for descriptor in self._locals.descriptors:
            if descriptor in events:
                self._locals.handle(descriptor)

    def _patience_ms(self) -> int:
        if self._fetch is not None and self._fetch.has_copies:
            return 0
        return max(1, int((self._next_beat_s - time.monotonic()) * 1000))

    def _hear(self, uplink: PublisherConnection) -> None:
        before = uplink.announced
        uplink.hear()
        if uplink.announced != before:
            self._ask_manifest_s = 0.0

    def _take_chunks(self, source: ParentConnection) -> None:
        for _ in range(_DRAIN):
            fetch = self._fetch
            received = source.receive()
            if received is None or fetch is None:
                return
            reply, payload = received
            if isinstance(reply, ChunkPending):
                continue
            if isinstance(reply, VersionGone):
                if WeightVersion(reply.epoch, reply.version) == fetch.identity:
                    self._gone_at_relay = fetch.identity if source.is_relay else None
                    self._interrupt()
                    return
            else:
                try:
                    if fetch.accept(reply, payload):
                        self._server.arrived(fetch.identity, reply.index)
                except WeightsCorrupt:
                    if not source.is_relay:
                        raise
                    self._lose_source("its chunks fail their hashes")
                    return
                for request in fetch.requests(time.monotonic()):
                    source.ask(request)

    def _serve_relay(self) -> None:
        for _ in range(_DRAIN):
            try:
                self._server.handle(self._relay.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                return

    def _close(self) -> None:
        self._locals.close()
        self._keeper.close()
        if self._uplink is not None:
            self._uplink.send(ReceiverLeaving(node=self._node))
            self._uplink.requests.close(_GOODBYE_MS)
            self._uplink.close()
        self._leave_source()
        self._context.destroy(_GOODBYE_MS)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the process; started by the first rollout server, which hands its lock over."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the servers' to handle: this process ends with them
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(description="Receives the weights of one run for one machine (internal).")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--config", required=True)
    given = parser.parse_args(arguments)
    config = WeightsConfig.model_validate_json(given.config)
    NodeReceiver(ReceiverPaths(given.store), config, keys_for(config)).run()


if __name__ == "__main__":
    main()
