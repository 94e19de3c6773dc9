"""Which hosts are this machine's own."""

from __future__ import annotations

import pytest

from async_grpo.config.http import HttpConfig
from async_grpo.utils.addresses import is_loopback
from async_grpo.weights.zmq import sockets


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]", "::ffff:127.0.0.1"])
def test_addresses_of_the_loopback_are_recognised(host: str) -> None:
    assert is_loopback(host)
    assert HttpConfig(host=host).is_local
    assert sockets.is_loopback(f"tcp://{host}:5600")


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "::", "10.0.0.1", "127.evil.example", "node0"])
def test_other_hosts_are_not_the_loopback(host: str) -> None:
    assert not is_loopback(host)
    assert not sockets.is_loopback(f"tcp://{host}:5600")
