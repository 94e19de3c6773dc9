"""Binds torch to one address. By default its stores listen on all interfaces, and its collectives on the address of the
machine's name."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Iterable
from typing import Any

import psutil

from async_grpo.utils.private_names import check_private_names

LOOPBACK = "127.0.0.1"
GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"


def card_of(address: str) -> str | None:
    """The network card that has the address (`eth0`, say); None if there is none."""
    wanted = LOOPBACK if address.startswith("127.") else address
    cards = psutil.net_if_addrs().items()
    return next((card for card, found in cards if any(entry.address == wanted for entry in found)), None)


def address_towards(host: str, port: int = 1) -> str:
    """The address from which this machine reaches `host`; the loopback if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # finds the route; nothing is sent
        except OSError:
            return LOOPBACK
        address: str = probe.getsockname()[0]
        return address


def card_environment(address: str, variables: Iterable[str] = ()) -> dict[str, str]:
    """Environment in which collectives run over the card that has the address; empty if none has.

    `variables` are those of libraries other than gloo. They get `=` before the name, which asks for exactly this card:
    `eth1` would also mean eth10.
    """
    card = card_of(address)
    return {} if card is None else {GLOO_VARIABLE: card} | {name: f"={card}" for name in variables}


def keep_stores_at_their_address() -> None:
    """Make stores that `init_process_group("tcp://HOST:PORT")` or `env://` opens in this process listen at HOST only.

    This is for third-party code; this project opens its own stores on sockets that are already bound. Raises
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
