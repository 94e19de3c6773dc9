"""Binds torch to one address.

By default its stores listen on all interfaces, and its collectives on the address of the machine's name.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Iterable
from typing import Any

import psutil

from async_grpo.utils.private_names import check_private_names

LOOPBACK = "127.0.0.1"
GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"


def find_card(address: str) -> str | None:
    """Return the network card with the address, such as `eth0`; None if there is none."""
    if address.startswith("127."):
        address = LOOPBACK
    for card, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return card
    return None


def address_towards(host: str, port: int = 1) -> str:
    """Return the address from which this machine reaches `host`; the loopback if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # finds the route; nothing is sent
        except OSError:
            return LOOPBACK
        address: str = probe.getsockname()[0]
        return address


def card_environment(address: str, variables: Iterable[str] = ()) -> dict[str, str]:
    """Return the environment in which collectives use the card with the address; empty if there is none.

    `variables` are those of libraries other than gloo. They get `=` before the name, which selects exactly this card:
    `eth1` would also match eth10.
    """
    card = find_card(address)
    if card is None:
        return {}
    environment = {GLOO_VARIABLE: card}
    for name in variables:
        environment[name] = f"={card}"
    return environment


def keep_stores_at_their_address() -> None:
    """Make stores that `init_process_group("tcp://HOST:PORT")` or `env://` opens in this process listen at HOST only.

    Third-party code needs this; this project opens its own stores on sockets that are already bound. Raises
    DependencyError if torch no longer has the name that is replaced.
    """
    check_private_names("engine worker, torch")
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # of the package it is a function
    store = rendezvous.TCPStore

    def bound_store(
        host_name: str, port: int, world_size: int | None = None, is_master: bool = False, *more: Any, **options: Any
    ) -> Any:
        if is_master:
            options["master_listen_fd"] = socket.create_server((host_name, port)).detach()
        return store(host_name, port, world_size, is_master, *more, **options)

    rendezvous.TCPStore = bound_store
