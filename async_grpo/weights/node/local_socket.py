"""The Unix socket between the receiver process and its machine's rollout servers: records, process side, start.

    rollout server --ServerHello, FollowPublisher, Hold, Release-->  receiver process
                   <--ReceiverState, Held, Failed-----------------

Each message is a length-prefixed frame with one MessagePack record. The connection closes when either process ends,
even if it is killed, so both sides detect it.

Files of a receiver (`ReceiverPaths`):

    NAME.weights   the store       NAME.sock   the Unix socket       NAME.lock   locked while the process runs

The server that gets the lock starts the process and passes the locked file to it. The lock belongs to the open file, so
it is held from before the process exists until it ends, even if it is killed. So there is never a second receiver, even
if two servers try to start one at the same time.

A receiver removes all three files when it ends. If it is killed, they remain: the next receiver adopts the store, or
the last server removes the files (`remove_abandoned_files`).
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
from async_grpo.utils.files import is_locked, make_private_folder, try_lock
from async_grpo.utils.frames import pack_frame, take_frame
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.node.stats import ReceiverStats
from async_grpo.weights.shared_memory import remove_empty_run_folder
from async_grpo.wire import encode
from async_grpo.wire.board import PublisherAddress
from async_grpo.wire.records import Record

MAX_FRAME_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_MALLOC_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
"""Make glibc reuse the memory of received chunks. Otherwise it is returned to the kernel, and zeroing new pages takes a
quarter of the transfer time."""


class ServerHello(Record, frozen=True, kw_only=True, tag="hello"):
    """A server has connected."""

    name: str
    has: tuple[int, int] | None = None
    """Version that it last loaded from the store. If there is one, a new receiver adopts the store."""
    holding: tuple[int, int] | None = None
    """Version that its engine is loading now."""


class FollowPublisher(Record, frozen=True, kw_only=True, tag="follow"):
    """The publisher's address from the run board. The receiver ignores addresses of older epochs."""

    address: PublisherAddress


class Hold(Record, frozen=True, kw_only=True, tag="hold"):
    """Do not overwrite the newest version until `Release`, because an engine loads it."""

    number: int


class Release(Record, frozen=True, kw_only=True, tag="release"):
    """The engine has loaded the version, or failed."""


class ReceiverState(Record, frozen=True, kw_only=True, tag="state"):
    """Sent after every new version and every heartbeat. `publisher` is empty until an address is known."""

    newest: tuple[int, int] | None = None
    publisher: str = ""
    epoch: int = -1
    silent_s: float = 0.0
    servers: int = 0
    """Number of connected servers."""
    stats: ReceiverStats


class Held(Record, frozen=True, kw_only=True, tag="held"):
    """Answer to the `Hold` with this number. `identity` is the protected version; None if there is none."""

    number: int
    identity: tuple[int, int] | None = None


class Failed(Record, frozen=True, kw_only=True, tag="failed"):
    """The error that ends the receiver. The server raises WeightsCorrupt if `corrupt`, else WeightsError."""

    message: str
    corrupt: bool = False


ToReceiver = ServerHello | FollowPublisher | Hold | Release
ToServer = ReceiverState | Held | Failed

_messages = msgspec.msgpack.Decoder(ToReceiver)


def pack_message(message: Record) -> bytes:
    """Encode a message as a frame. Raises ValueError above MAX_FRAME_BYTES."""
    return pack_frame(encode(message), MAX_FRAME_BYTES)


@dataclass(slots=True)
class _Server:
    """One rollout server's connection."""

    connection: socket.socket
    name: str = "?"
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytearray = field(default_factory=bytearray)
    holding: WeightVersion | None = None
    """The version that its engine loads now."""
    holding_since_s: float = 0.0
    last_loaded: WeightVersion | None = None


class LocalClients:
    """The connected rollout servers, and what they hold. Never blocks."""

    def __init__(self, path: Path, max_hold_s: float) -> None:
        """Bind the socket, replacing that of a dead receiver. The caller must have the receiver's lock."""
        self.newest: WeightVersion | None = None
        """The version that a `Hold` protects. Set by `StoreSlots`."""
        self.address: PublisherAddress | None = None
        self.store_in_use = False
        """True if a server has loaded weights from a store that was here before this process."""
        self.had_servers = False
        self.path = path
        self._max_hold_s = max_hold_s
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
        """File descriptors to poll for reading."""
        return [self._listener.fileno(), *self._servers]

    def handle_readable(self, descriptor: int) -> None:
        """Handle a readable descriptor: a new connection, a message, or a closed connection."""
        if descriptor == self._listener.fileno():
            self._accept()
        elif descriptor in self._servers:
            self._read(self._servers[descriptor])

    def is_held(self, identity: WeightVersion | None) -> bool:
        """True if an engine has been loading this version for less than `max_hold_s`."""
        oldest_s = time.monotonic() - self._max_hold_s
        return any(
            server.holding == identity and server.holding_since_s > oldest_s for server in self._servers.values()
        )

    @property
    def has_outdated_server(self) -> bool:
        """True if a server has not loaded the newest version yet."""
        return any(server.last_loaded != self.newest for server in self._servers.values())

    def broadcast(self, message: ReceiverState | Failed) -> None:
        """Send to all servers. Skips servers that have not read their last state: a later one replaces it."""
        for server in list(self._servers.values()):
            if not server.outgoing or isinstance(message, Failed):
                self._send(server, message)
            else:
                self._flush(server)

    def close(self) -> None:
        """Close all connections."""
        self.path.unlink(missing_ok=True)  # first, so that no server connects to a receiver that is ending
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
            # If a server was killed, answering one of its messages drops it. Later messages in its buffer must not be
            # answered: sending on the closed socket would end this process and stop updates for all other servers.
            while self._is_connected(server):
                payload = take_frame(server.incoming, MAX_FRAME_BYTES)
                if payload is None:
                    break
                self._on_message(server, _messages.decode(payload))
        except (WireError, msgspec.MsgspecError):
            self._drop(server)  # not one of ours

    def _on_message(self, server: _Server, message: ToReceiver) -> None:
        match message:
            case ServerHello():
                server.name = message.name
                server.last_loaded = WeightVersion(*message.has) if message.has else None
                self.store_in_use |= message.has is not None
                self._set_hold(server, WeightVersion(*message.holding) if message.holding else None)
            case FollowPublisher(address=address):
                # Servers poll the run board at different times. One that is behind must not lead us back.
                if self.address is None or address.epoch >= self.address.epoch:
                    self.address = address
            case Hold(number=number):
                self._set_hold(server, self.newest)
                self._send(server, Held(number=number, identity=self.newest))
            case Release():
                self._set_hold(server, None)

    def _set_hold(self, server: _Server, identity: WeightVersion | None) -> None:
        server.holding = identity
        server.holding_since_s = time.monotonic()
        if identity is not None:
            server.last_loaded = identity

    def _send(self, server: _Server, message: Record) -> None:
        server.outgoing += pack_message(message)
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
            self._drop(server)  # it has not read for a long time, and reconnects when it reads again

    def _is_connected(self, server: _Server) -> bool:
        return self._servers.get(server.connection.fileno()) is server

    def _drop(self, server: _Server) -> None:
        if self._servers.pop(server.connection.fileno(), None) is not None:
            server.connection.close()


@dataclass(frozen=True, slots=True)
class ReceiverPaths:
    """Paths of a receiver's files, derived from the path of its store."""

    store: Path

    @property
    def socket(self) -> Path:
        """The Unix socket."""
        return self.store.with_suffix(".sock")

    @property
    def lock(self) -> Path:
        """The lock file."""
        return self.store.with_suffix(".lock")

    def remove_lock(self) -> None:
        """Remove the lock file, which this process has locked, and the run's folder if it is empty then."""
        self.lock.unlink(missing_ok=True)
        remove_empty_run_folder(self.store.parent)


def start_receiver(paths: ReceiverPaths, config: WeightsConfig) -> subprocess.Popen[bytes] | None:
    """Start the receiver process. None if one is running. Raises ConfigError if the folder is not private.

    The process has a separate session and the run's mark instead of the role's mark, because it must outlive this
    server while others use it. It ends by itself after its last server.
    """
    make_private_folder(paths.store.parent)
    try:
        lock = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:  # a receiver that ended has just removed the folder; the caller retries
        return None
    try:
        if not _lock_file(paths.lock, lock):
            return None
        mark = {MARK_VARIABLE: run_mark(os.environ.get(MARK_VARIABLE, ""))}
        transport = "zmq" if config.location is None else "folder"
        program = [sys.executable, "-m", f"async_grpo.weights.{transport}.receiver"]
        return subprocess.Popen(
            [*program, str(paths.store), config.model_dump_json()],
            stdin=subprocess.DEVNULL,
            env=_MALLOC_SETTINGS | os.environ | mark,
            pass_fds=[lock],
            start_new_session=True,
        )
    finally:
        os.close(lock)  # the process has inherited the open file, and with it the lock


def remove_abandoned_files(paths: ReceiverPaths) -> bool:
    """Remove the files of a killed receiver, unless another receiver runs. Returns True if they were removed."""
    try:
        lock = os.open(paths.lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # the receiver was not killed and has removed its files
        return False
    try:
        # Remove under the lock: otherwise a server could start a receiver now, and we would remove its files.
        if not _lock_file(paths.lock, lock):
            return False
        paths.store.unlink(missing_ok=True)
        paths.socket.unlink(missing_ok=True)
        paths.remove_lock()
        return True
    finally:
        os.close(lock)


def is_abandoned(paths: ReceiverPaths) -> bool:
    """True if a receiver's files exist but no receiver runs."""
    return paths.lock.exists() and not is_locked(paths.lock)


def _lock_file(path: Path, lock: int) -> bool:
    """Lock the open file. False if another process has the lock, or if `path` is no longer this file."""
    if not try_lock(lock):
        return False
    # A receiver that ended may have removed the file after we opened it. Another server could then create and lock a
    # new file at the same path, and two receivers would run.
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False
