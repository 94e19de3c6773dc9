"""The publisher: a process of its own that serves the trainer's weight store over ZMQ.

    trainer's WeightStore --mmap--> ChunkServer --ROUTER--> up to `fanout` receivers, at their own pace
                          --mmap--> WeightEncoder (threads)
    trainer --PAIR "publish v"--> encode --> announce ----PUB--------> receivers, at once and every heartbeat
                                             RelayTracker <----ROUTER-----> receivers: who fetches from whom, manifests

One thread owns all sockets and waits in one poller: for the trainer (PAIR), for a receiver (ROUTER), for the encoder (a
pipe) or for the next heartbeat. It never writes to the store. The trainer may write only the slot that the answer to
`Prepare` clears. That answer waits for the encoder, which reads both slots, and spares the slot whose fetches began
earlier, so a slow receiver can finish however fast versions follow each other. The process dies with the one that
started it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import structlog
import zmq

from async_grpo.config.weights import WeightsConfig
from async_grpo.weights.chunks import ServedVersion, cut_into_chunks
from async_grpo.weights.encoder import Encoded, WeightEncoder
from async_grpo.weights.manifest import WeightManifest, WeightVersion
from async_grpo.weights.store import WeightStore
from async_grpo.weights.zmq.chunk_server import MAX_REQUEST_BYTES, ChunkServer
from async_grpo.weights.zmq.messages import (
    Announcement,
    Cleared,
    ManifestReply,
    Prepare,
    Publish,
    Published,
    PublisherReady,
    PublisherStats,
    StatsRequest,
    TrainerOrder,
)
from async_grpo.weights.zmq.relay_tree import RelayTracker
from async_grpo.weights.zmq.sockets import (
    Context,
    CurveGuard,
    CurveKeys,
    connection_count,
    is_loopback,
    keys_for,
    listen,
)
from async_grpo.wire import encode

KEY_BYTES = 16
_orders = msgspec.msgpack.Decoder(TrainerOrder)

log = structlog.get_logger()


class PublisherProcess:
    """The loop: the trainer's orders, receivers' requests, heartbeats."""

    def __init__(
        self, store: WeightStore, epoch: int, config: WeightsConfig, control: str, keys: CurveKeys | None
    ) -> None:
        self._store = store
        self._epoch = epoch
        self._config = config
        self._chunks = cut_into_chunks(store.layout, config.chunk_bytes)
        self._stats = PublisherStats()
        self._newest: ServedVersion | None = None
        self._manifests: dict[WeightVersion, WeightManifest] = {}
        self._encoder = WeightEncoder(self._chunks, config.encoding, config.encode_threads)
        self._prepare_since_s: float | None = None
        self._bind(Context(connection_count(config)), control, keys)

    def _bind(self, context: Context, control: str, keys: CurveKeys | None) -> None:
        bind, heartbeat_s = self._config.bind, self._config.heartbeat_s
        if keys is None and not is_loopback(bind):
            log.warning("weights are served to whoever can reach the publisher; see weights.encrypt", bind=bind)
        self._guard = CurveGuard(context, keys)
        self._control = context.socket(zmq.PAIR)
        self._announce = context.socket(zmq.PUB)
        requests, chunks = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
        for listener in (self._announce, requests, chunks):
            self._guard.watch_listener(listener)
            listener.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        told = self._config.advertise
        announce, control_endpoint = listen(self._announce, bind, 0, keys, told), listen(requests, bind, 1, keys, told)
        chunks_endpoint = listen(chunks, bind, 2, keys if self._config.encrypt == "all" else None, told)
        self._tracker = RelayTracker(requests, self._config.fanout, chunks_endpoint, heartbeat_s)
        self._server = ChunkServer(
            chunks,
            time.monotonic,
            idle_s=self._config.request_timeout_s,
            max_fetch_s=self._config.update_timeout_s,
        )
        self._requests, self._chunk_requests = requests, chunks
        self._control.connect(control)
        self._control.send(encode(PublisherReady(announce=announce, requests=control_endpoint)))

    def run(self) -> None:
        """Serve until the process is killed."""
        poller = zmq.Poller()
        sockets = (self._control, self._requests, self._chunk_requests, *self._guard.sockets)
        for waited_for in (*sockets, self._encoder.wake):
            poller.register(waited_for, zmq.POLLIN)
        next_heartbeat_s = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= next_heartbeat_s:
                self._heartbeat()
                next_heartbeat_s = now + self._config.heartbeat_s
            events = dict(poller.poll(max(1, int((next_heartbeat_s - now) * 1000))))
            if self._control in events:
                self._on_order(_orders.decode(self._control.recv()))
            if self._encoder.wake in events:
                self._serve(self._encoder.take_result())
            if self._chunk_requests in events:
                self._server.serve_requests()
            if self._requests in events:
                self._tracker.handle_request(self._requests.recv_multipart(), self._newest_manifest)
            for guarded in self._guard.sockets:
                if guarded in events:
                    self._guard.handle_event(guarded)
            self._clear_slot()

    def _on_order(self, order: TrainerOrder) -> None:
        match order:
            case Prepare():
                self._prepare_since_s = time.monotonic()
            case Publish():
                self._control.send(encode(Published(**order.identity._asdict())))
                block = self._store.snapshot(order.identity).block
                self._encoder.start_encoding(order.identity, block, self._newest)
            case StatsRequest():
                self._control.send(encode(self._count()))

    def _clear_slot(self) -> None:
        """Answer `Prepare` once the encoder has let go of both slots."""
        if self._prepare_since_s is None:
            return
        waited_s = time.monotonic() - self._prepare_since_s
        if self._encoder.is_busy:
            if waited_s >= self._config.encode_wait_s:
                self._encoder.cancel_patches()
            return
        self._prepare_since_s = None
        self._stats.waited_s += waited_s
        self._control.send(encode(Cleared(spare=self._withdraw_one())))

    def _withdraw_one(self) -> WeightVersion | None:
        """Stop serving the version that will be overwritten; returns the other one if it must be spared."""
        victim, spare = self._store.version_to_overwrite(), None
        newest = self._newest
        if victim is not None and newest is not None and victim != newest.identity:
            older_s, newer_s = self._server.in_use_since(victim), self._server.in_use_since(newest.identity)
            if older_s is not None and (newer_s is None or older_s <= newer_s):
                victim, spare = newest.identity, victim
        if victim is not None:
            self._server.withdraw_version(victim)
            self._manifests.pop(victim, None)
            if newest is not None and victim == newest.identity:
                self._newest = self._server.get_version(spare)
        return spare

    def _serve(self, encoded: Encoded) -> None:
        layout, chunk_bytes = self._store.layout, self._config.chunk_bytes
        manifest = encoded.make_manifest(layout, chunk_bytes, encoded.base, key=os.urandom(KEY_BYTES))
        block = self._store.snapshot(encoded.identity).block
        served = ServedVersion.from_block(manifest, self._chunks, block, encoded.patches)
        if self._newest is not None:
            self._newest.drop_patches()
        self._newest = served
        self._manifests[served.identity] = manifest
        self._server.offer_version(served)
        self._note(encoded)
        self._announce_newest()

    def _note(self, encoded: Encoded) -> None:
        stats = self._stats
        stats.versions += 1
        stats.delta_versions += encoded.base is not None
        stats.encoded_bytes += encoded.encoded_bytes
        if encoded.reason and self._config.encoding != "dense":
            stats.fallbacks[encoded.reason] = stats.fallbacks.get(encoded.reason, 0) + 1

    def _count(self) -> PublisherStats:
        stats, server = self._stats, self._server
        stats.served_bytes, stats.served_chunks = server.served_bytes, server.served_chunks
        stats.unsigned, stats.refused = server.unsigned, self._guard.refused
        stats.receivers, stats.direct_receivers = self._tracker.count_receivers()
        return stats

    def _newest_manifest(self) -> ManifestReply:
        return ManifestReply(manifest=self._manifests[self._newest.identity] if self._newest else None)

    def _heartbeat(self) -> None:
        self._tracker.remove_silent_receivers()
        self._server.send_pending()
        self._announce_newest()

    def _announce_newest(self) -> None:
        version = self._newest.identity.version if self._newest else None
        self._announce.send(encode(Announcement(epoch=self._epoch, version=version)))


def main(store: str, epoch: str, control: str, config_json: str) -> None:
    """Entry point of the process; started by `ZmqWeightSender`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    config = WeightsConfig.model_validate_json(config_json)
    PublisherProcess(WeightStore.open(Path(store)), int(epoch), config, control, keys_for(config)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
