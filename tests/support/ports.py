"""TCP ports that are free now."""

from __future__ import annotations

import contextlib
import random
import socket

_given: set[int] = set()


def free_port() -> int:
    """A TCP port that nobody listens on, given once: servers that start together never get the same one.

    Outgoing connections do not take it either, for Linux gives them ports from 32768.
    """
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port


def two_free_ports(address: str) -> int:
    """The lower of two neighbours."""
    while True:
        with socket.socket() as one, socket.socket() as next_one:
            one.bind((address, 0))
            port: int = one.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                next_one.bind((address, port + 1))
                return port
