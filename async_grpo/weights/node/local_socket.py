"""The Unix socket between the receiver process of a machine and the rollout servers on it: records, server side, start.

    rollout server --ServerHello, FollowPublisher, Hold, Release-->  receiver process
                   <--ReceiverState, Held, Failed-----------------

Each message is a length-prefixed frame with one MessagePack record. The connection ends when either process ends,
however that happens, so its end tells the other side.

Files of the receiver, beside each other (`ReceiverPaths`):

    NAME.weights   the store       NAME.sock   the Unix socket       NAME.lock   held while the process lives

The server that gets the lock starts the process and passes the locked file on to it. The lock belongs to the open file,
so it is held from before the process exists until it ends, however it ends. So there is never a second receiver, even
if two servers try to start one at the same time.

A receiver removes all three files when it ends. One that was killed leaves them: the next receiver takes the store
over, and a server that leaves while none runs removes them (`remove_abandoned_files`).
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
_KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
"""Makes glibc keep the memory of received chunks. Otherwise it goes back to the kernel, and clearing its pages again
takes a quarter of the time of a transfer."""


class ServerHello(Record, frozen=True, kw_only=True, tag="hello"):
    """A server connects. `has` is the version that it last took from the store; if there is one, the store is kept."""

    name: str
    has: tuple[int, int] | None = None
    holding: tuple[int, int] | None = None


class FollowPublisher(Record, frozen=True, kw_only=True, tag="follow"):
    """The publisher that the run board names. The receiver ignores one of an older epoch than it knows."""

    address: PublisherAddress


class Hold(Record, frozen=True, kw_only=True, tag="hold"):
    """Do not overwrite the newest version until `Release`: an engine loads it."""

    number: int


class Release(Record, frozen=True, kw_only=True, tag="release"):
    """The engine has loaded the held version, or has given up."""


class ReceiverState(Record, frozen=True, kw_only=True, tag="state"):
    """Sent at every new version and every heartbeat. `publisher` is "" while none is known."""

    newest: tuple[int, int] | None = None
    publisher: str = ""
    epoch: int = -1
    silent_s: float = 0.0
    servers: int = 0
    """Number of connected servers."""
    stats: ReceiverStats


class Held(Record, frozen=True, kw_only=True, tag="held"):
    """Answers the `Hold` of that number: the version that will not be overwritten, None if there is none yet."""

    number: int
    identity: tuple[int, int] | None = None


class Failed(Record, frozen=True, kw_only=True, tag="failed"):
    """Why the receiver ends. The server raises WeightsCorrupt if `corrupt`, else WeightsError."""

    message: str
    corrupt: bool = False


ToReceiver = ServerHello | FollowPublisher | Hold | Release
ToServer = ReceiverState | Held | Failed

_messages = msgspec.msgpack.Decoder(ToReceiver)


def pack_message(message: Record) -> bytes:
    """The message as a frame. Raises ValueError above MAX_FRAME_BYTES."""
    return pack_frame(encode(message), MAX_FRAME_BYTES)


@dataclass(slots=True)
class _Server:
    """One rollout server's connection."""

    connection: socket.socket
    name: str = "?"
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytearray = field(default_factory=bytearray)
    held: WeightVersion | None = None
    held_s: float = 0.0
    taken: WeightVersion | None = None


class LocalClients:
    """The connected rollout servers. Never blocks. A `Hold` holds the version `newest`."""

    def __init__(self, path: Path, longest_hold_s: float) -> None:
        """Bind the socket, replacing that of a dead receiver; the caller holds the receiver's lock."""
        self.newest: WeightVersion | None = None
        self.address: PublisherAddress | None = None
        self.store_in_use = False
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
        """File descriptors to poll for reading."""
        return [self._listener.fileno(), *self._servers]

    def handle_readable(self, descriptor: int) -> None:
        """Handle a readable descriptor: a new server, a message, or the end of a connection."""
        if descriptor == self._listener.fileno():
            self._accept()
        elif descriptor in self._servers:
            self._read(self._servers[descriptor])

    def is_held(self, identity: WeightVersion | None) -> bool:
        """Whether an engine is loading this version, and has not taken longer than `longest_hold_s`."""
        oldest = time.monotonic() - self._longest_hold_s
        return any(server.held == identity and server.held_s > oldest for server in self._servers.values())

    @property
    def has_outdated_server(self) -> bool:
        """Whether a server has not yet taken the newest version."""
        return any(server.taken != self.newest for server in self._servers.values())

    def broadcast(self, message: ReceiverState | Failed) -> None:
        """Send to all servers. One that has not read its last state is left out: states replace each other."""
        for server in list(self._servers.values()):
            if not server.outgoing or isinstance(message, Failed):
                self._send(server, message)
            else:
                self._flush(server)

    def close(self) -> None:
        """Close all connections. The path goes first, so that no server connects to a receiver that ends."""
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
            # An answer to a server that was killed drops it. Its later messages in the buffer must not be answered:
            # sending on the closed socket would end this process, and with it the weights of all other servers.
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
                server.taken = WeightVersion(*message.has) if message.has else None
                self.store_in_use |= message.has is not None
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
        server.taken = identity or server.taken

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
            self._drop(server)  # it has not read for a long time; it reconnects when it reads again

    def _is_connected(self, server: _Server) -> bool:
        return self._servers.get(server.connection.fileno()) is server

    def _drop(self, server: _Server) -> None:
        if self._servers.pop(server.connection.fileno(), None) is not None:
            server.connection.close()


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

    def remove_lock(self) -> None:
        """Remove the lock file, which this process has locked, and then the run's folder if nothing else is in it."""
        self.lock.unlink(missing_ok=True)
        remove_empty_run_folder(self.store.parent)


def start_receiver(paths: ReceiverPaths, config: WeightsConfig) -> subprocess.Popen[bytes] | None:
    """Start the receiver process; None if one is running already. Raises ConfigError as `make_private_folder`.

    It has a session of its own and carries the mark of the run, not that of the role that started it, because it must
    outlive this server while others use it. It ends by itself when no server is left.
    """
    make_private_folder(paths.store.parent)
    try:
        lock = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:  # a receiver that ended has just removed the folder; the caller tries again
        return None
    try:
        if not _try_lock_at(paths.lock, lock):
            return None
        marked = {MARK_VARIABLE: run_mark(os.environ.get(MARK_VARIABLE, ""))}
        transport = "zmq" if config.location is None else "folder"
        program = [sys.executable, "-m", f"async_grpo.weights.{transport}.receiver"]
        return subprocess.Popen(
            [*program, str(paths.store), config.model_dump_json()],
            stdin=subprocess.DEVNULL,
            env=_KEPT_MEMORY | os.environ | marked,
            pass_fds=[lock],
            start_new_session=True,
        )
    finally:
        os.close(lock)


def remove_abandoned_files(paths: ReceiverPaths) -> bool:
    """Remove the files that a killed receiver left, unless another receiver runs; returns True if they are removed."""
    try:
        lock = os.open(paths.lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # the receiver has ended in order
        return False
    try:
        if not _try_lock_at(paths.lock, lock):
            return False
        paths.store.unlink(missing_ok=True)
        paths.socket.unlink(missing_ok=True)
        paths.remove_lock()
        return True
    finally:
        os.close(lock)


def is_abandoned(paths: ReceiverPaths) -> bool:
    """True if there are files of a receiver, but no receiver runs."""
    return paths.lock.exists() and not is_locked(paths.lock)


def _try_lock_at(path: Path, lock: int) -> bool:
    """Lock the open file; False if another process holds it. Also False if `path` is not that file any more: a receiver
    that ended removed it in between, and a second one could lock the new file."""
    if not try_lock(lock):
        return False
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False
