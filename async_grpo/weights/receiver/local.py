"""The receiver's side of the Unix socket: which servers are there, and what they hold."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from async_grpo.errors import WireError
from async_grpo.weights.manifest import Identity
from async_grpo.weights.receiver.local_messages import (
    LENGTH,
    MAX_FRAME_BYTES,
    Failed,
    Follow,
    Held,
    Hello,
    Hold,
    Release,
    State,
    ToReceiver,
    frame,
    frame_length,
)
from async_grpo.wire.board import PublisherAddress
from async_grpo.wire.records import Record

_READ_BYTES = 1 << 16
_messages = msgspec.msgpack.Decoder(ToReceiver)


@dataclass(slots=True)
class _Server:
    """One rollout server's connection."""

    connection: socket.socket
    name: str = "?"
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytearray = field(default_factory=bytearray)
    held: Identity | None = None
    held_s: float = 0.0


class LocalServers:
    """Accepts connections at `path`; never blocks. `newest` is what a `Hold` takes hold of."""

    def __init__(self, path: Path, longest_hold_s: float) -> None:
        """Binds, replacing what a dead receiver left: the caller holds the receiver's lock."""
        self.newest: Identity | None = None
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

    def holds(self, identity: Identity | None) -> bool:
        """A server's engine is loading this version, and has not taken longer than an update may."""
        oldest = time.monotonic() - self._longest_hold_s
        return any(server.held == identity and server.held_s > oldest for server in self._servers.values())

    def tell_all(self, message: State | Failed) -> None:
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
            while (payload := _next_frame(server.incoming)) is not None:
                self._obey(server, _messages.decode(payload))
        except (WireError, msgspec.MsgspecError):
            self._drop(server)  # not one of ours

    def _obey(self, server: _Server, message: ToReceiver) -> None:
        match message:
            case Hello():
                server.name = message.name
                self.store_is_used |= message.has is not None
                self._hold(server, Identity(*message.holding) if message.holding else None)
            case Follow(address=address):
                if self.address is None or address.epoch >= self.address.epoch:
                    self.address = address
            case Hold(number=number):
                self._hold(server, self.newest)
                self._send(server, Held(number=number, identity=self.newest))
            case Release():
                self._hold(server, None)

    def _hold(self, server: _Server, identity: Identity | None) -> None:
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


def _next_frame(incoming: bytearray) -> bytes | None:
    """Take one whole frame off the front."""
    if len(incoming) < LENGTH.size:
        return None
    end = LENGTH.size + frame_length(bytes(incoming[: LENGTH.size]))
    if len(incoming) < end:
        return None
    payload = bytes(incoming[LENGTH.size : end])
    del incoming[:end]
    return payload
