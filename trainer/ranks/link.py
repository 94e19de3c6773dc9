"""Connections between rank 0 and the other ranks on its machine, for the threads that copy weights.

    rank 0   listens on a Unix socket with a random name, in the run's folder of /dev/shm; sends the name to all ranks
    rank R   connects: if that works, it is on rank 0's machine
             <--(version, slot)-- rank 0        --(version, rank), or a failure and its reason--> rank 0

Only a random name proves that two ranks share a machine. The store's own file does not: a trainer that was killed may
have left one on another machine. Ranks there would fill that one, and rank 0 would wait for them forever.

Each rank has its own connection. The queue of a datagram socket shared by all ranks (10 messages in a container) could
be full before rank 0 reads it, and the ranks that are done would spin until it does. All sockets are blocking, with
timeouts.
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
    """Rank 0's listening socket, which exists until the ranks of its machine have connected."""

    def __init__(self, folder: Path, ranks: int) -> None:
        """Listen in `folder` for at most `ranks` ranks."""
        self.path = folder / f"r-{token_hex(5)}"  # short: a socket path has at most 107 bytes
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.settimeout(CONNECT_TIMEOUT_S)
        self._listener.bind(str(self.path))
        self._listener.listen(ranks)

    def accept_ranks(self, ranks: Collection[int]) -> dict[int, socket.socket]:
        """Accept the connections of these ranks, which have all connected already. Raises WaitTimeout."""
        connections: dict[int, socket.socket] = {}
        try:
            while len(connections) < len(ranks):
                connection, _ = self._listener.accept()
                connection.settimeout(CONNECT_TIMEOUT_S)
                hello = connection.recv(_RANK.size)
                if not hello:  # a rank that gave up; it counts as remote
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
    """Connect this rank to rank 0, which listens at `path`; None if rank 0 is on another machine."""
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
    """This rank's connections: on rank 0 to the other ranks of its machine, on those to rank 0.

    `timeout_s`: maximum wait per message.
    """

    def __init__(self, connections: dict[int, socket.socket], timeout_s: float) -> None:
        self._connections = connections
        self._timeout_s = timeout_s

    @property
    def ranks(self) -> list[int]:
        """The ranks at the other ends."""
        return sorted(self._connections)

    def send(self, rank: int, version: int, number: int) -> None:
        """Send the number of a slot or a rank for this version. Raises NodeLost, WaitTimeout."""
        connection = self._connections[rank]
        connection.settimeout(self._timeout_s)
        try:
            connection.send(_MESSAGE.pack(version, number))
        except TimeoutError:
            raise WaitTimeout(f"rank {rank} to read about version {version}", self._timeout_s) from None
        except OSError as error:
            raise NodeLost(f"rank {rank} no longer copies weights (version {version}): {error}") from None

    def send_failure(self, rank: int, version: int, error: BaseException) -> None:
        """Report that this rank cannot copy this version, if the other end is still connected."""
        reason = f"{type(error).__name__}: {error}".encode()[:_REASON_BYTES]
        with suppress(OSError):
            self._connections[rank].send(_MESSAGE.pack(version, _FAILED) + reason)

    def receive(self, ranks: Collection[int], version: int, waited_for: str) -> dict[int, int]:
        """Wait for the number of this version from each of these ranks. Raises NodeLost, WaitTimeout.

        Numbers of other versions are left over from a copy that failed, and are dropped.
        """
        numbers: dict[int, int] = {}
        deadline = time.monotonic() + self._timeout_s
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                selector.register(self._connections[rank], selectors.EVENT_READ, rank)
            while True:
                missing = sorted(set(ranks) - numbers.keys())
                if not missing:
                    return numbers
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise WaitTimeout(f"{waited_for} of version {version} from ranks {missing}", self._timeout_s)
                for key, _ in ready:
                    message_version, number = self._read_message(key.data, version)
                    if message_version == version:
                        numbers[key.data] = number
                        selector.unregister(key.fileobj)

    def close(self) -> None:
        """Close the connections. Safe to call twice."""
        for connection in self._connections.values():
            connection.close()

    def _read_message(self, rank: int, version: int) -> tuple[int, int]:
        """Return version and number. Raises NodeLost if the rank has ended, or could not copy."""
        reason = "its process has ended"
        message = b""
        try:
            message = self._connections[rank].recv(_MESSAGE.size + _REASON_BYTES)
        except OSError as error:
            reason = str(error)
        if message:
            message_version, number = _MESSAGE.unpack_from(message)
            if number != _FAILED:
                return message_version, number
            reason = message[_MESSAGE.size :].decode("utf-8", "replace")
        raise NodeLost(f"rank {rank} did not copy its weights of version {version}: {reason}")
