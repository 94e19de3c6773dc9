"""The receiver's side of the Unix socket: which servers are there, and what they hold.

Between the receiver process of a machine and the rollout servers on it, over a Unix socket.

    server --Hello, Follow, Hold, Release-->  receiver
           <--State, Held, Failed---------------

A frame is its length (4 bytes, big-endian) and one MessagePack record. The connection itself carries
a fact too: it ends when either process ends, however that happens.

Where the receiver of a machine lies, and how the first server starts it.

    NAME.weights   the store       NAME.sock   the Unix socket       NAME.lock   held while the process lives

Whoever gets the lock starts the process and hands the locked file over to it: the lock belongs to the
open file, so it is held from before the process exists until it ends, however it ends. There is never
a second one, and never a moment in which two servers start one each.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import WireError
from async_grpo.utils.child_process import MARK_VARIABLE, run_mark
from async_grpo.utils.files import try_lock
from async_grpo.utils.frames import pack_frame, take_frame
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.zmq.messages import ReceiverStats
from async_grpo.wire import encode
from async_grpo.wire.board import PublisherAddress
from async_grpo.wire.records import Record

MAX_FRAME_BYTES = 1 << 20


class ServerHello(Record, frozen=True, kw_only=True, tag="hello"):
    """A server is there. `has` is what it took from the store last, if anything: the store is then worth keeping."""

    name: str
    has: tuple[int, int] | None = None
    holding: tuple[int, int] | None = None


class FollowPublisher(Record, frozen=True, kw_only=True, tag="follow"):
    """The publisher that the run board names; one of an older epoch than that of another server is ignored."""

    address: PublisherAddress


class Hold(Record, frozen=True, kw_only=True, tag="hold"):
    """Leave the newest version alone until `Release`: an engine loads it."""

    number: int


class Release(Record, frozen=True, kw_only=True, tag="release"):
    """The engine has loaded it, or given up."""


class ReceiverState(Record, frozen=True, kw_only=True, tag="state"):
    """At every new version and every heartbeat. `publisher` is "" while none is known."""

    newest: tuple[int, int] | None = None
    publisher: str = ""
    epoch: int = -1
    silent_s: float = 0.0
    servers: int = 0
    """How many are connected."""
    stats: ReceiverStats


class Held(Record, frozen=True, kw_only=True, tag="held"):
    """The answer to the hold of that number: this version is left alone; None if there is none yet."""

    number: int
    identity: tuple[int, int] | None = None


class Failed(Record, frozen=True, kw_only=True, tag="failed"):
    """The receiver ends because of this; `corrupt` tells which error it is for the server."""

    message: str
    corrupt: bool = False


ToReceiver = ServerHello | FollowPublisher | Hold | Release


ToServer = ReceiverState | Held | Failed


def frame(message: Record) -> bytes:
    """The message as it goes over the socket."""
    return pack_frame(encode(message), MAX_FRAME_BYTES)


_READ_BYTES = 1 << 16


_messages = msgspec.msgpack.Decoder(ToReceiver)


@dataclass(slots=True)
class _Server:
    """One rollout server's connection."""

    connection: socket.socket
    name: str = "?"
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytearray = field(default_factory=bytearray)
    held: WeightVersion | None = None
    held_s: float = 0.0


class LocalClients:
    """Accepts connections at `path`; never blocks. `newest` is what a `Hold` takes hold of."""

    def __init__(self, path: Path, longest_hold_s: float) -> None:
        """Binds, replacing what a dead receiver left: the caller holds the receiver's lock."""
        self.newest: WeightVersion | None = None
        self.address: PublisherAddress | None = None
        self.store_is_used = False
        self.had_servers = False
        self.path = path
        self._longest_hold_s = longest_hold_s
        self._servers: dict[int, _Server] = {}
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(64)

    def __len__(self) -> int:
        return len(self._servers)

    @property
    def descriptors(self) -> list[int]:
        """To be polled."""
        return [self._listener.fileno(), *self._servers]

    def handle(self, descriptor: int) -> None:
        """Something came: a new server, a message, or an end."""
        if descriptor == self._listener.fileno():
            self._accept()
        elif descriptor in self._servers:
            self._read(self._servers[descriptor])

    def holds(self, identity: WeightVersion | None) -> bool:
        """A server's engine is loading this version, and has not taken longer than an update may."""
        oldest = time.monotonic() - self._longest_hold_s
        return any(server.held == identity and server.held_s > oldest for server in self._servers.values())

    def tell_all(self, message: ReceiverState | Failed) -> None:
        """States replace each other: a server that has not read the last one is left out."""
        for server in list(self._servers.values()):
            if not server.outgoing or isinstance(message, Failed):
                self._send(server, message)
            else:
                self._flush(server)

    def close(self) -> None:
        """Unlinks the path first, so that nobody connects to what is about to end."""
        self.path.unlink(missing_ok=True)
        for server in list(self._servers.values()):
            server.connection.close()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._servers[connection.fileno()] = _Server(connection)
            self.had_servers = True

    def _read(self, server: _Server) -> None:
        try:
            received = server.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            received = b""
        if not received:
            self._drop(server)
            return
        server.incoming += received
        try:
            while (payload := take_frame(server.incoming, MAX_FRAME_BYTES)) is not None:
                self._obey(server, _messages.decode(payload))
        except (WireError, msgspec.MsgspecError):
            self._drop(server)  # not one of ours

    def _obey(self, server: _Server, message: ToReceiver) -> None:
        match message:
            case ServerHello():
                server.name = message.name
                self.store_is_used |= message.has is not None
                self._hold(server, WeightVersion(*message.holding) if message.holding else None)
            case FollowPublisher(address=address):
                if self.address is None or address.epoch >= self.address.epoch:
                    self.address = address
            case Hold(number=number):
                self._hold(server, self.newest)
                self._send(server, Held(number=number, identity=self.newest))
            case Release():
                self._hold(server, None)

    def _hold(self, server: _Server, identity: WeightVersion | None) -> None:
        server.held, server.held_s = identity, time.monotonic()

    def _send(self, server: _Server, message: Record) -> None:
        server.outgoing += frame(message)
        self._flush(server)

    def _flush(self, server: _Server) -> None:
        try:
            sent = server.connection.send(server.outgoing) if server.outgoing else 0
        except BlockingIOError:
            sent = 0
        except ConnectionError:
            self._drop(server)
            return
        del server.outgoing[:sent]
        if len(server.outgoing) > MAX_FRAME_BYTES:
            self._drop(server)  # it has not read for long; it connects again when it does

    def _drop(self, server: _Server) -> None:
        if self._servers.pop(server.connection.fileno(), None) is not None:
            server.connection.close()


_KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
"""For glibc: else the memory of every received chunk goes back to the kernel, and comes again as pages that have to be
cleared, which takes a quarter of the time of a transfer."""


@dataclass(frozen=True, slots=True)
class ReceiverPaths:
    """`store` is the path of the weight store; everything else lies beside it."""

    store: Path

    @property
    def socket(self) -> Path:
        """The Unix socket."""
        return self.store.with_suffix(".sock")

    @property
    def lock(self) -> Path:
        """The lock file."""
        return self.store.with_suffix(".lock")


def start_receiver(place: ReceiverPaths, config: WeightsConfig) -> subprocess.Popen[bytes] | None:
    """Start the receiver process; None if one lives already.

    It is in a session of its own and carries the mark of the run, not that of the role that started it: it must
    outlive this server as long as there are others. It ends by itself when there are none.
    """
    place.store.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(place.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not try_lock(lock):
            return None
        marked = {MARK_VARIABLE: run_mark(os.environ.get(MARK_VARIABLE, ""))}
        arguments = ["--store", str(place.store), "--config", config.model_dump_json()]
        return subprocess.Popen(
            [sys.executable, "-m", "async_grpo.weights.zmq.node_receiver", *arguments],
            stdin=subprocess.DEVNULL,
            env=_KEPT_MEMORY | os.environ | marked,
            pass_fds=[lock],
            start_new_session=True,
        )
    finally:
        os.close(lock)
