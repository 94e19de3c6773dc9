"""Keys from a shared secret."""

from __future__ import annotations

import pytest
import zmq

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import ConfigError
from async_grpo.weights.zmq.sockets import SECRET_VARIABLE, derive_keys, keys_for


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
    with pytest.raises(ConfigError, match=rf"has {len(secret)} characters, at least 16 are needed") as caught:
        keys_for(WeightsConfig(encrypt="control"))
    assert not secret or secret not in str(caught.value)
