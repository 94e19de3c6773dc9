"""Keys from a shared secret, and the addresses at which others connect."""

from __future__ import annotations

import socket

import pytest
import zmq
from pydantic import ValidationError

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import ConfigError
from async_grpo.weights.zmq.sockets import SECRET_VARIABLE, derive_keys, keys_for, reachable_endpoint

ALL = "tcp://0.0.0.0:0"


def test_keys_follow_from_the_secret_belong_together_and_are_not_shown() -> None:
    keys, others = derive_keys("a secret of some length"), derive_keys("another secret of length")
    assert keys == derive_keys("a secret of some length")
    assert len({keys.server_secret, keys.client_secret, others.server_secret, others.client_secret}) == 4
    assert zmq.curve_public(keys.server_secret) == keys.server_public
    assert zmq.curve_public(keys.client_secret) == keys.client_public
    assert keys.server_secret.decode() not in repr(keys)


def test_without_encryption_no_secret_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    assert keys_for(WeightsConfig()) is None


@pytest.mark.parametrize("secret", ["", "short"])
def test_a_missing_or_short_secret_is_refused_without_being_shown(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, secret)
    with pytest.raises(ConfigError, match=rf"has {len(secret)} characters; at least 16 are needed") as caught:
        keys_for(WeightsConfig(encrypt="control"))
    assert not secret or secret not in str(caught.value)


def test_a_relay_on_all_addresses_is_announced_under_the_one_that_reaches_the_publisher() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no route to anywhere")
        own = probe.getsockname()[0]
    assert reachable_endpoint("tcp://192.0.2.1:5601", "tcp://a-name:5610", ALL) == f"tcp://{own}:5610"


@pytest.mark.parametrize(
    ("peer", "endpoint", "bind"),
    [
        ("tcp://127.0.0.1:5601", "tcp://a-name:5610", ALL),  # the loopback tells others nothing
        ("tcp://no.such.host.invalid:5601", "tcp://a-name:5610", ALL),
        ("tcp://192.0.2.1:5601", "tcp://10.0.0.5:5610", "tcp://10.0.0.5:5610"),  # it was chosen
    ],
)
def test_any_other_address_is_announced_as_it_is(peer: str, endpoint: str, bind: str) -> None:
    assert reachable_endpoint(peer, endpoint, bind) == endpoint


@pytest.mark.parametrize("keys", [{"advertise": "10.0.0.5"}, {"relay_advertise": "10.0.0.5"}])
def test_others_are_not_sent_to_an_address_where_nobody_listens(keys: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="listens on the loopback only"):
        WeightsConfig(**keys)
