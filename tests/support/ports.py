"""Ports that are free now."""

from __future__ import annotations

import contextlib
import socket


def two_free_ports(address: str) -> int:
    """The lower of two neighbours."""
    while True:
        with socket.socket() as one, socket.socket() as next_one:
            one.bind((address, 0))
            port: int = one.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                next_one.bind((address, port + 1))
                return port
