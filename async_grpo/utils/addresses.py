"""Hosts of endpoints, and the test for loopback addresses."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """True if only this machine reaches the host, which is an address or a name: ::1, [::1], 127.0.1.1, localhost."""
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)  # ::ffff:127.0.0.1
    return (mapped or address).is_loopback


def split_endpoint(endpoint: str) -> tuple[str, str]:
    """Split an endpoint into host and port.

    >>> split_endpoint("tcp://[::1]:5600")
    ('[::1]', '5600')
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, port
