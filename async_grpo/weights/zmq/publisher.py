"""The publisher: a separate process that serves the trainer's weight store over ZMQ.

    trainer's WeightStore --mmap--> ChunkServer --ROUTER--> up to `fanout` receivers, at their own pace
                          --mmap--> WeightEncoder (threads)
    trainer --PAIR "publish v"--> encode --> announce --PUB--> receivers, immediately and every heartbeat
                                             RelayTracker <--ROUTER--> receivers: parents and manifests

One thread owns all sockets and waits in one poller: for the trainer (PAIR), a receiver (ROUTER), the encoder (a pipe)
or the next heartbeat. It never writes to the store.

The trainer may only write the slot that the answer to `Prepare` clears. That answer waits for the encoder, which reads
both slots. It protects the slot whose fetches started earlier, so a slow receiver can finish however fast the trainer
publishes. The process dies with the thread that started it.
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
    """The publisher's loop: orders of the trainer, requests of receivers, heartbeats."""

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
        config = self._config
        if keys is None and not is_loopback(config.bind):
            log.warning(
                "weights are served unencrypted to every machine that can reach the publisher; see weights.encrypt",
                bind=config.bind,
            )
        self._guard = CurveGuard(context, keys)  # before the sockets are bound: it answers their handshakes
        self._control = context.socket(zmq.PAIR)
        self._announce = context.socket(zmq.PUB)
        self._requests = context.socket(zmq.ROUTER)
        self._chunk_requests = context.socket(zmq.ROUTER)
        for listener in (self._announce, self._requests, self._chunk_requests):
            self._guard.watch_listener(listener)
            listener.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)

        chunk_keys = keys if config.encrypt == "all" else None
        announce = listen(self._announce, config.bind, 0, keys, config.advertise)
        requests = listen(self._requests, config.bind, 1, keys, config.advertise)
        chunks = listen(self._chunk_requests, config.bind, 2, chunk_keys, config.advertise)

        self._tracker = RelayTracker(self._requests, config.fanout, chunks, config.heartbeat_s)
        self._server = ChunkServer(
            self._chunk_requests,
            time.monotonic,
            idle_s=config.request_timeout_s,
            max_fetch_s=config.update_timeout_s,
        )
        self._control.connect(control)
        self._control.send(encode(PublisherReady(announce=announce, requests=requests)))

    def run(self) -> None:
        """Serve until the process is killed."""
        poller = zmq.Poller()
        sockets = (self._control, self._requests, self._chunk_requests, *self._guard.sockets)
        for source in (*sockets, self._encoder.wake):
            poller.register(source, zmq.POLLIN)

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
                self._serve_version(self._encoder.take_result())
            if self._chunk_requests in events:
                self._server.serve_requests()
            if self._requests in events:
                self._tracker.handle_request(self._requests.recv_multipart(), self._newest_manifest)
            for guard_socket in self._guard.sockets:
                if guard_socket in events:
                    self._guard.handle_event(guard_socket)
            self._answer_prepare()

    def _on_order(self, order: TrainerOrder) -> None:
        match order:
            case Prepare():
                self._prepare_since_s = time.monotonic()
            case Publish():
                # Answer before encoding: the trainer continues with its next step meanwhile.
                self._control.send(encode(Published(**order.identity._asdict())))
                block = self._store.snapshot(order.identity).block
                self._encoder.start_encoding(order.identity, block, self._newest)
            case StatsRequest():
                self._control.send(encode(self._collect_stats()))

    def _answer_prepare(self) -> None:
        """Answer a pending `Prepare` once the encoder reads neither slot any more."""
        if self._prepare_since_s is None:
            return
        waited_s = time.monotonic() - self._prepare_since_s
        if self._encoder.is_busy:
            if waited_s >= self._config.encode_wait_s:
                self._encoder.cancel_patches()
            return
        self._prepare_since_s = None
        self._stats.waited_s += waited_s
        self._control.send(encode(Cleared(spare=self._withdraw_version())))

    def _withdraw_version(self) -> WeightVersion | None:
        """Stop serving one of the two versions, whose slot will be overwritten. Returns the other if it is in use.

        By default the older version is withdrawn. If its oldest fetch started before any fetch of the newer one, the
        newer version is withdrawn instead; otherwise a slow receiver would never finish.
        """
        withdrawn = self._store.version_to_overwrite()
        if withdrawn is None:
            return None

        protected = None
        newest = self._newest
        if newest is not None and withdrawn != newest.identity:
            older_s = self._server.in_use_since(withdrawn)
            newer_s = self._server.in_use_since(newest.identity)
            if older_s is not None and (newer_s is None or older_s <= newer_s):
                withdrawn, protected = newest.identity, withdrawn

        self._server.withdraw_version(withdrawn)
        self._manifests.pop(withdrawn, None)
        if newest is not None and withdrawn == newest.identity:
            self._newest = self._server.get_version(protected)
        return protected

    def _serve_version(self, encoded: Encoded) -> None:
        """Serve and announce a version that has been encoded."""
        manifest = encoded.make_manifest(
            self._store.layout, self._config.chunk_bytes, encoded.base, key=os.urandom(KEY_BYTES)
        )
        block = self._store.snapshot(encoded.identity).block
        served = ServedVersion.from_block(manifest, self._chunks, block, encoded.patches)

        if self._newest is not None:
            self._newest.drop_patches()
        self._newest = served
        self._manifests[served.identity] = manifest
        self._server.offer_version(served)
        self._count_version(encoded)
        self._announce_newest()

    def _count_version(self, encoded: Encoded) -> None:
        stats = self._stats
        stats.versions += 1
        stats.delta_versions += encoded.base is not None
        stats.encoded_bytes += encoded.encoded_bytes
        if encoded.reason and self._config.encoding != "dense":
            stats.fallbacks[encoded.reason] = stats.fallbacks.get(encoded.reason, 0) + 1

    def _collect_stats(self) -> PublisherStats:
        stats = self._stats
        stats.served_bytes = self._server.served_bytes
        stats.served_chunks = self._server.served_chunks
        stats.unsigned = self._server.unsigned
        stats.refused = self._guard.refused
        stats.receivers, stats.direct_receivers = self._tracker.count_receivers()
        return stats

    def _newest_manifest(self) -> ManifestReply:
        if self._newest is None:
            return ManifestReply()
        return ManifestReply(manifest=self._manifests[self._newest.identity])

    def _heartbeat(self) -> None:
        self._tracker.remove_silent_receivers()
        self._server.send_pending()
        self._announce_newest()

    def _announce_newest(self) -> None:
        version = self._newest.identity.version if self._newest else None
        self._announce.send(encode(Announcement(epoch=self._epoch, version=version)))


def main(store: str, epoch: str, control: str, config_json: str) -> None:
    """Entry point of the process, which `ZmqWeightSender` starts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C and then terminates this process
    config = WeightsConfig.model_validate_json(config_json)
    PublisherProcess(WeightStore.open(Path(store)), int(epoch), config, control, keys_for(config)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
