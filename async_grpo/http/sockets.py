"""The socket that a server listens on, and how others find it."""

from __future__ import annotations

import ipaddress
import socket


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 is any free one. Raises OSError.

    Two sockets may be bound to one port as long as neither listens, so both are tried here.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def address_of(host: str, port: int) -> str:
    """Where others find what listens there; a socket on all addresses is found by the machine's name."""
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        return f"http://{socket.gethostname()}:{port}"
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"
