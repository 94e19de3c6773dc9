"""The publisher: a process of its own that serves the trainer's weight store over ZMQ.

    trainer's WeightStore --mmap--> chunks, zero-copy --ROUTER--> receivers, at their own pace
    trainer --PAIR "publish v"----> announcement ----PUB--------> receivers, at once and every heartbeat

One thread owns all three sockets and waits in one poller: for the trainer (PAIR), for a request
(ROUTER) or for the next heartbeat. It never writes to the store. A chunk of a slot that the trainer
has begun to overwrite is answered `Gone`; one that is overwritten on its way fails its hash at the
receiver. It dies with the process that started it.
"""

from __future__ import annotations

import argparse
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from async_grpo.process import die_with_parent
from async_grpo.weights.manifest import Identity, Manifest, count_chunks, manifest_of
from async_grpo.weights.messages import (
    Announcement,
    ChunkReply,
    ChunkRequest,
    Gone,
    ManifestReply,
    ManifestRequest,
    Publish,
    Published,
    Ready,
    Reply,
    Request,
)
from async_grpo.weights.store import Snapshot, WeightStore
from async_grpo.wire import decode, encode

MAX_REQUEST_BYTES = 4096
"""Requests are three integers; a peer that sends more is none of ours and is disconnected."""

_WILDCARDS = ("0.0.0.0", "*", "[::]")
_requests = msgspec.msgpack.Decoder(Request)


@dataclass(frozen=True, slots=True)
class Served:
    """One version that can be fetched as long as its slot is not overwritten."""

    snapshot: Snapshot
    manifest: Manifest


class Shelf:
    """The versions that the two slots of the store hold, and the answers to requests for them."""

    def __init__(self, store: WeightStore, chunk_bytes: int) -> None:
        self._store = store
        self._chunk_bytes = chunk_bytes
        self._served: dict[Identity, Served] = {}
        self._newest: Served | None = None

    @property
    def newest(self) -> Identity | None:
        """The version that is announced."""
        return self._newest.manifest.identity if self._newest else None

    def put(self, identity: Identity) -> None:
        """Hash and serve what the store now holds under `identity`."""
        snapshot = self._store.snapshot(identity)
        manifest = manifest_of(identity, self._store.layout, snapshot.block, self._chunk_bytes)
        self._newest = Served(snapshot, manifest)
        self._served = {key: served for key, served in self._served.items() if served.snapshot.still_valid}
        self._served[identity] = self._newest

    def answer(self, request: Request) -> tuple[Reply, memoryview | None]:
        """The reply and, for a chunk, its bytes in place."""
        match request:
            case ManifestRequest():
                return ManifestReply(manifest=self._newest.manifest if self._newest else None), None
            case ChunkRequest(epoch=epoch, version=version, index=index):
                served = self._served.get(Identity(epoch, version))
                if served is None or not served.snapshot.still_valid or not self._has_chunk(index):
                    return Gone(epoch=epoch, version=version), None
                chunk = served.snapshot.block[served.manifest.chunk(index)]
                return ChunkReply(epoch=epoch, version=version, index=index), chunk

    def _has_chunk(self, index: int) -> bool:
        return 0 <= index < count_chunks(self._store.layout.total_bytes, self._chunk_bytes)


class Publisher:
    """The loop: the trainer's orders, receivers' requests, heartbeats."""

    def __init__(self, shelf: Shelf, epoch: int, bind: str, control: str, heartbeat_s: float) -> None:
        self._shelf = shelf
        self._epoch = epoch
        self._heartbeat_s = heartbeat_s
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._control = context.socket(zmq.PAIR)
        self._announce = context.socket(zmq.PUB)
        self._requests = context.socket(zmq.ROUTER)
        self._requests.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        self._requests.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        announce = _bind(self._announce, bind, 0)
        requests = _bind(self._requests, bind, 1)
        self._control.connect(control)
        self._control.send(encode(Ready(announce=announce, requests=requests)))

    def run(self) -> None:
        """Serve for ever."""
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._requests, zmq.POLLIN)
        next_beat = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= next_beat:
                self._send_announcement()
                next_beat = now + self._heartbeat_s
            events = dict(poller.poll(max(1, int((next_beat - now) * 1000))))
            if self._control in events:
                self._publish(decode(self._control.recv(), Publish))
            if self._requests in events:
                self._serve(self._requests.recv_multipart())

    def _publish(self, order: Publish) -> None:
        self._shelf.put(Identity(order.epoch, order.version))
        self._send_announcement()
        self._control.send(encode(Published(epoch=order.epoch, version=order.version)))

    def _serve(self, frames: list[bytes]) -> None:
        peer, payload = frames[0], frames[-1]
        try:
            request = _requests.decode(payload)
        except msgspec.MsgspecError:
            return  # not one of ours: an unanswered request is repeated or given up by its sender
        reply, chunk = self._shelf.answer(request)
        header = [peer, encode(reply)]
        self._requests.send_multipart(header if chunk is None else [*header, chunk], copy=False)

    def _send_announcement(self) -> None:
        newest = self._shelf.newest
        self._announce.send(encode(Announcement(epoch=self._epoch, version=newest.version if newest else None)))


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the process; started by `WeightPublisher`."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    parser = argparse.ArgumentParser(description="Serves the weights of one trainer (internal).")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--bind", required=True)
    parser.add_argument("--control", required=True)
    parser.add_argument("--chunk-bytes", type=int, required=True)
    parser.add_argument("--heartbeat-s", type=float, required=True)
    given = parser.parse_args(arguments)
    shelf = Shelf(WeightStore.open(given.store), given.chunk_bytes)
    Publisher(shelf, given.epoch, given.bind, given.control, given.heartbeat_s).run()


def _bind(listener: zmq.Socket[bytes], bind: str, port_offset: int) -> str:
    """Bind to the given port (0: any free one; otherwise plus the offset) and say where others
    reach it: a wildcard host is announced as this machine's name."""
    host, port = bind.removeprefix("tcp://").rsplit(":", 1)
    listener.setsockopt(zmq.LINGER, 0)
    listener.bind(f"tcp://{host}:{int(port) + port_offset if int(port) else '*'}")
    real_port = listener.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1]
    return f"tcp://{socket.gethostname() if host in _WILDCARDS else host}:{real_port}"


if __name__ == "__main__":
    main()
