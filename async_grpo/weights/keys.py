"""CURVE keys from one shared secret.

    ASYNC_GRPO_WEIGHTS_SECRET --scrypt--> 64 bytes = secret key of the servers | secret key of the clients

Any 32 bytes are a secret key of Curve25519, so the two halves are used as they are, and both sides
arrive at the same four keys without exchanging any. scrypt makes every guess of a weak secret cost
tens of milliseconds and 16 MiB: who records a handshake can try guesses on it. The salt is fixed,
because the two sides have nothing else in common before they talk; use one secret a run.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import ConfigError

SECRET_VARIABLE = "ASYNC_GRPO_WEIGHTS_SECRET"
MIN_SECRET_CHARACTERS = 16
_SALT = b"async-grpo weights 1"
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Keys:
    """Z85 text, as ZMQ takes it. All servers of a run share one pair, all clients the other."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    def __repr__(self) -> str:
        return "Keys(...)"


def keys_for(config: WeightsConfig) -> Keys | None:
    """None if nothing is encrypted. Raises ConfigError if the secret is missing or too short."""
    if config.encrypt == "off":
        return None
    secret = os.environ.get(SECRET_VARIABLE, "")
    if len(secret) < MIN_SECRET_CHARACTERS:
        raise ConfigError(
            f"weights.encrypt is {config.encrypt!r}, but {SECRET_VARIABLE} has {len(secret)} characters, at least "
            f"{MIN_SECRET_CHARACTERS} are needed. Set it to the same random text for the trainer and every rollout "
            "server (openssl rand -hex 32)"
        )
    return derive_keys(secret)


def derive_keys(secret: str) -> Keys:
    """The same keys for the same secret, everywhere."""
    both = hashlib.scrypt(secret.encode(), salt=_SALT, n=1 << 14, r=8, p=1, dklen=2 * _KEY_BYTES)
    server, client = z85.encode(both[:_KEY_BYTES]), z85.encode(both[_KEY_BYTES:])
    return Keys(zmq.curve_public(server), server, zmq.curve_public(client), client)
