"""Connections between rank 0 and the other ranks on its machine, for the threads that copy weights.

    rank 0   listens in the run's folder of /dev/shm, under a random name
             sends the name to all ranks
    rank R   connects: if that works, it is on the machine of rank 0
             <--(version, slot)-- rank 0        --(version, rank), or why it failed--> rank 0

The random name decides who shares the memory of rank 0. The store's own file cannot: a trainer that was killed may have
left one on another machine, whose ranks would fill that, and rank 0 would wait for them for ever.

Each rank has its own connection. With one datagram socket for all, its queue (10 messages in a container) would be full
before rank 0 reads it, and the ranks that are done would spin until it does. All sockets are blocking, with timeouts.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from async_grpo.errors import NodeLost, WaitTimeout

CONNECT_TIMEOUT_S = 30.0
_MESSAGE = struct.Struct("<qq")  # version; number of a slot or a rank
_RANK = struct.Struct("<q")
_FAILED = -1
_REASON_BYTES = 1000


class RankListener:
    """Rank 0's socket, from before the other ranks try to connect until those of this machine have."""

    def __init__(self, folder: Path, ranks: int) -> None:
        """Listen in `folder`, for at most so many ranks."""
        self.path = folder / f"r-{token_hex(5)}"  # short: a socket's path has 107 bytes at most
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.settimeout(CONNECT_TIMEOUT_S)
        self._listener.bind(str(self.path))
        self._listener.listen(ranks)

    def accept_ranks(self, ranks: Collection[int]) -> dict[int, socket.socket]:
        """The connections of these ranks, all of which have connected. Raises WaitTimeout."""
        connections: dict[int, socket.socket] = {}
        try:
            while len(connections) < len(ranks):
                connection, _ = self._listener.accept()
                connection.settimeout(CONNECT_TIMEOUT_S)
                hello = connection.recv(_RANK.size)
                if not hello:  # of a rank that gave up, and counts as one of another machine
                    connection.close()
                    continue
                (rank,) = _RANK.unpack(hello)
                connections[rank] = connection
        except TimeoutError:
            missing = sorted(set(ranks) - connections.keys())
            raise WaitTimeout(f"ranks {missing} to connect to rank 0 on this machine", CONNECT_TIMEOUT_S) from None
        finally:
            self.close()
        return connections

    def close(self) -> None:
        """Stop listening, and remove the path. Safe to call twice."""
        self._listener.close()
        self.path.unlink(missing_ok=True)


def try_connect(path: Path, rank: int) -> socket.socket | None:
    """The connection of this rank to rank 0, which listens at `path`; None if that is on another machine."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(CONNECT_TIMEOUT_S)
    try:
        connection.connect(str(path))
        connection.send(_RANK.pack(rank))
    except OSError:
        connection.close()
        return None
    return connection


class RankLink:
    """This rank's connections by rank: on rank 0 to all others of its machine, there to rank 0."""

    def __init__(self, connections: dict[int, socket.socket], timeout_s: float) -> None:
        """`timeout_s`: for every message."""
        self._connections = connections
        self._timeout_s = timeout_s

    @property
    def ranks(self) -> list[int]:
        """The ranks at the other ends."""
        return sorted(self._connections)

    def send(self, rank: int, version: int, number: int) -> None:
        """Send a number about this version. Raises NodeLost, WaitTimeout."""
        connection = self._connections[rank]
        connection.settimeout(self._timeout_s)
        try:
            connection.send(_MESSAGE.pack(version, number))
        except TimeoutError:
            raise WaitTimeout(f"rank {rank} to read about version {version}", self._timeout_s) from None
        except OSError as error:
            raise NodeLost(f"rank {rank} does not copy weights any more (version {version}): {error}") from None

    def send_failure(self, rank: int, version: int, error: BaseException) -> None:
        """Send why this rank will not copy this version, if the other end is still there."""
        reason = f"{type(error).__name__}: {error}".encode()[:_REASON_BYTES]
        with suppress(OSError):
            self._connections[rank].send(_MESSAGE.pack(version, _FAILED) + reason)

    def receive(self, ranks: Collection[int], version: int, waited_for: str) -> dict[int, int]:
        """The next number about this version from each of these ranks. Raises NodeLost, WaitTimeout."""
        numbers: dict[int, int] = {}
        deadline = time.monotonic() + self._timeout_s
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                selector.register(self._connections[rank], selectors.EVENT_READ, rank)
            while missing := sorted(set(ranks) - numbers.keys()):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise WaitTimeout(f"{waited_for} of version {version} from ranks {missing}", self._timeout_s)
                for key, _ in ready:
                    told, number = self._read_message(key.data, version)
                    if told == version:
                        numbers[key.data] = number
                        selector.unregister(key.fileobj)
        return numbers

    def close(self) -> None:
        """Close the connections. Safe to call twice."""
        for connection in self._connections.values():
            connection.close()

    def _read_message(self, rank: int, version: int) -> tuple[int, int]:
        """Version and number. Raises NodeLost if the rank has ended, or could not copy."""
        reason = "its process has ended"
        try:
            message = self._connections[rank].recv(_MESSAGE.size + _REASON_BYTES)
        except OSError as error:
            message, reason = b"", str(error)
        if message:
            told, number = _MESSAGE.unpack_from(message)
            if number != _FAILED:
                return told, number
            reason = message[_MESSAGE.size :].decode("utf-8", "replace")
        raise NodeLost(f"rank {rank} did not copy its weights of version {version}: {reason}")
