"""The publisher: a process of its own that serves the trainer's weight store over ZMQ.

    trainer's WeightStore --mmap--> ChunkServer --ROUTER--> up to `fanout` receivers, at their own pace
                          --mmap--> Encoder (threads)
    trainer --PAIR "publish v"--> encode --> announce ----PUB--------> receivers, at once and every heartbeat
                                             RelayTracker <----ROUTER-----> receivers: who fetches from whom, manifests

One thread owns all sockets and waits in one poller: for the trainer (PAIR), for a receiver (ROUTER), for
the encoder (a pipe) or for the next heartbeat. It never writes to the store. The trainer may write only
what `Prepare` cleared: it waits for the encoder, which reads both slots, and of the two slots the one
whose fetches began earlier is left alone, so a slow receiver comes to its end however fast versions
follow each other. It dies with the process that started it.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import msgspec
import structlog
import zmq

from async_grpo.config.weights import WeightsConfig
from async_grpo.weights.chunks import cut, digest, hashes_of
from async_grpo.weights.manifest import BaseVersion, WeightManifest, WeightVersion
from async_grpo.weights.store import WeightStore
from async_grpo.weights.zmq.chunk_server import MAX_REQUEST_BYTES, ChunkServer, ServedVersion
from async_grpo.weights.zmq.encoder import Encoded, WeightEncoder
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
    count,
)
from async_grpo.weights.zmq.relay_tree import RelayTracker
from async_grpo.weights.zmq.sockets import Context, CurveGuard, CurveKeys, is_loopback, keys_for, listen
from async_grpo.wire import encode

KEY_BYTES = 16
_DRAIN = 16
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
        self._chunks = cut(store.layout, config.chunk_bytes)
        self._stats = PublisherStats()
        self._newest: ServedVersion | None = None
        self._manifests: dict[WeightVersion, bytes] = {}
        self._encoder = WeightEncoder(config.encoding, config.encode_threads)
        self._ordered = Publish(epoch=epoch, version=-1)
        self._prepare_since_s: float | None = None
        self._bind(Context(), control, keys)

    def _bind(self, context: Context, control: str, keys: CurveKeys | None) -> None:
        bind, heartbeat_s = self._config.bind, self._config.heartbeat_s
        if keys is None and not is_loopback(bind):
            log.warning("weights are served to whoever can reach the publisher; see weights.encrypt", bind=bind)
        self._guard = CurveGuard(context, keys)
        self._control = context.socket(zmq.PAIR)
        self._announce = context.socket(zmq.PUB)
        requests, chunks = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
        for listener in (self._announce, requests, chunks):
            self._guard.watch(listener)
            listener.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        told = self._config.advertise
        announce, control_endpoint = listen(self._announce, bind, 0, keys, told), listen(requests, bind, 1, keys, told)
        chunks_endpoint = listen(chunks, bind, 2, keys if self._config.encrypt == "all" else None, told)
        self._tracker = RelayTracker(requests, self._config.fanout, chunks_endpoint, heartbeat_s)
        self._server = ChunkServer(
            chunks,
            time.monotonic,
            idle_s=self._config.request_timeout_s,
            longest_s=self._config.update_timeout_s,
        )
        self._requests, self._chunk_requests = requests, chunks
        self._control.connect(control)
        self._control.send(encode(PublisherReady(announce=announce, requests=control_endpoint)))

    def run(self) -> None:
        """Serve for ever."""
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
                self._serve(self._encoder.take())
            if self._chunk_requests in events:
                self._drain_chunk_requests()
            if self._requests in events:
                self._tracker.handle(self._requests.recv_multipart(), self._manifest())
            for guarded in self._guard.sockets:
                if guarded in events:
                    self._guard.handle(guarded)
            self._clear_slot()

    def _drain_chunk_requests(self) -> None:
        for _ in range(_DRAIN):
            try:
                self._server.handle(self._chunk_requests.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                return

    def _on_order(self, order: TrainerOrder) -> None:
        match order:
            case Prepare():
                self._prepare_since_s = time.monotonic()
            case Publish():
                self._ordered = order
                self._control.send(encode(Published(epoch=order.epoch, version=order.version)))
                identity = WeightVersion(order.epoch, order.version)
                block = self._store.snapshot(identity).block
                self._encoder.start(identity, self._chunks, block, self._newest)
            case StatsRequest():
                self._control.send(encode(self._count()))

    def _clear_slot(self) -> None:
        """Answer `Prepare` once the encoder has let go of both slots."""
        if self._prepare_since_s is None:
            return
        waited_s = time.monotonic() - self._prepare_since_s
        if self._encoder.busy:
            if waited_s >= self._config.encode_wait_s:
                self._encoder.cancel()
            return
        self._prepare_since_s = None
        self._stats.last_wait_s = waited_s
        self._stats.waited_s += waited_s
        self._control.send(encode(Cleared(spare=self._withdraw_one())))

    def _withdraw_one(self) -> WeightVersion | None:
        """Take the version that is about to be overwritten off the shelf; says which other to spare."""
        victim, spare = self._store.next_victim(), None
        newest = self._newest
        if victim is not None and newest is not None and victim != newest.identity:
            older_s, newer_s = self._server.in_use_since(victim), self._server.in_use_since(newest.identity)
            if older_s is not None and (newer_s is None or older_s <= newer_s):
                victim, spare = newest.identity, victim
        if victim is not None:
            self._server.withdraw(victim)
            self._manifests.pop(victim, None)
            if newest is not None and victim == newest.identity:
                self._newest = self._server.served(spare)
        return spare

    def _serve(self, encoded: Encoded) -> None:
        manifest = self._manifest_of(encoded)
        served = ServedVersion(
            identity=encoded.identity,
            key=manifest.key,
            chunks=self._chunks,
            hashes=hashes_of(manifest, self._chunks),
            digest=digest(manifest.hashes),
            block=self._store.snapshot(encoded.identity).block,
            patches=encoded.patches,
        )
        if self._newest is not None:
            self._newest.patches = {}  # whoever still fetches that version gets it dense
        self._newest = served
        self._manifests[served.identity] = encode(ManifestReply(manifest=manifest))
        self._server.offer(served)
        self._note(encoded)
        self._announce_newest()

    def _manifest_of(self, encoded: Encoded) -> WeightManifest:
        base = encoded.base
        return WeightManifest(
            epoch=encoded.identity.epoch,
            version=encoded.identity.version,
            layout=self._store.layout,
            chunk_bytes=self._config.chunk_bytes,
            hashes=encoded.hashes,
            key=os.urandom(KEY_BYTES),
            base=BaseVersion(epoch=base.identity.epoch, version=base.identity.version, digest=base.digest)
            if base
            else None,
        )

    def _note(self, encoded: Encoded) -> None:
        stats, dense_bytes = self._stats, self._store.layout.total_bytes
        stats.versions += 1
        stats.delta_versions += encoded.base is not None
        stats.dense_bytes += dense_bytes
        stats.encoded_bytes += encoded.encoded_bytes
        stats.last_ratio = dense_bytes / max(1, encoded.encoded_bytes)
        stats.last_snapshot_s = self._ordered.snapshot_s
        stats.last_hash_s, stats.last_encode_s = encoded.hash_s, encoded.encode_s
        if encoded.reason and self._config.encoding != "dense":
            count(stats.fallbacks, encoded.reason)

    def _count(self) -> PublisherStats:
        stats, server = self._stats, self._server
        stats.served_bytes, stats.served_chunks = server.served_bytes, server.served_chunks
        stats.served_patches, stats.unsigned = server.served_patches, server.unsigned
        stats.receivers, stats.direct_receivers = self._tracker.receivers, self._tracker.direct_receivers
        stats.most_behind = self._tracker.most_behind(self._newest.identity) if self._newest else 0
        stats.refused = self._guard.refused
        return stats

    def _manifest(self) -> bytes:
        return self._manifests[self._newest.identity] if self._newest else encode(ManifestReply())

    def _heartbeat(self) -> None:
        self._tracker.forget_silent()
        self._server.reassure()
        self._announce_newest()

    def _announce_newest(self) -> None:
        version = self._newest.identity.version if self._newest else None
        self._announce.send(encode(Announcement(epoch=self._epoch, version=version)))


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the process; started by `ZmqWeightSender`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    parser = argparse.ArgumentParser(description="Serves the weights of one trainer (internal).")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--control", required=True)
    parser.add_argument("--config", required=True)
    given = parser.parse_args(arguments)
    config = WeightsConfig.model_validate_json(given.config)
    PublisherProcess(WeightStore.open(given.store), given.epoch, config, given.control, keys_for(config)).run()


if __name__ == "__main__":
    main()
