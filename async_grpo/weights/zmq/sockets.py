"""ZMQ sockets of the transport: binding, connecting, encryption with CURVE, and refused peers.

A guarded process answers ZMQ's authentication requests (ZAP) itself: it admits only the clients' key of this run. Peers
with other keys or none fail before that, in the handshake. Both are logged, at most once in `REPORT_EVERY_S`.

The keys come from one shared secret:

    ASYNC_GRPO_WEIGHTS_SECRET --scrypt--> 64 bytes = secret key of the servers | secret key of the clients

Any 32 bytes are a secret key of Curve25519, so the two halves are used as they are, and both sides derive the same four
keys without exchanging any. An attacker who records a handshake can test guesses of the secret against it; scrypt makes
each guess cost tens of milliseconds and 16 MiB. The salt is fixed, because the two sides share nothing else before they
talk; use one secret a run.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from dataclasses import dataclass

import structlog
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import ConfigError
from async_grpo.utils import addresses
from async_grpo.utils.addresses import split_endpoint
from async_grpo.utils.network import address_towards

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

SECRET_VARIABLE = "ASYNC_GRPO_WEIGHTS_SECRET"
MIN_SECRET_CHARACTERS = 16
MAX_CONNECTIONS = 4
CORES_PER_CONNECTION = 8
HEARTBEATS_OF_SILENCE = 4
"""A peer that was not heard for this many heartbeats is considered lost."""
REPORT_EVERY_S = 10.0
HEARTBEAT_MS = 500
HEARTBEAT_TIMEOUT_MS = 4 * HEARTBEAT_MS
_SALT = b"async-grpo weights 1"
_KEY_BYTES = 32
_WILDCARDS = ("0.0.0.0", "*")
_DOMAIN = b"weights"
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Two key pairs as Z85 text, which ZMQ takes. All servers of a run share one pair, all clients the other."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    def __repr__(self) -> str:
        return "CurveKeys(...)"


def keys_for(config: WeightsConfig) -> CurveKeys | None:
    """The keys of this run; None if nothing is encrypted. Raises ConfigError if the secret is missing or too short."""
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


def derive_keys(secret: str) -> CurveKeys:
    """The keys that follow from the secret; the same on every machine."""
    both = hashlib.scrypt(secret.encode(), salt=_SALT, n=1 << 14, r=8, p=1, dklen=2 * _KEY_BYTES)
    server, client = z85.encode(both[:_KEY_BYTES]), z85.encode(both[_KEY_BYTES:])
    return CurveKeys(zmq.curve_public(server), server, zmq.curve_public(client), client)


def connection_count(config: WeightsConfig) -> int:
    """How many connections, and threads of ZMQ, this end has for chunks (`weights.connections`)."""
    return config.connections or max(1, min(MAX_CONNECTIONS, len(os.sched_getaffinity(0)) // CORES_PER_CONNECTION))


def listen(listener: Socket, bind: str, port_offset: int, keys: CurveKeys | None, advertise: str | None = None) -> str:
    """Bind to the port of `bind` plus the offset (port 0: any free one). Returns the endpoint that others connect to.

    Its host is `advertise` if given, this machine's name for a wildcard, else the host of `bind`.
    """
    _set_common(listener)
    if keys is not None:
        listener.curve_server = True
        listener.curve_secretkey = keys.server_secret
        listener.zap_domain = _DOMAIN
    host, port = split_endpoint(bind)
    listener.bind(f"tcp://{host}:{int(port) + port_offset if int(port) else '*'}")
    _, real_port = split_endpoint(listener.getsockopt_string(zmq.LAST_ENDPOINT))
    return f"tcp://{advertise or (socket.gethostname() if host in _WILDCARDS else host)}:{real_port}"


def reachable_endpoint(peer: str, endpoint: str, bind: str) -> str:
    """`endpoint`; if `bind` is a wildcard, with the address from which this machine reaches `peer` as its host.

    Unlike the machine's name, that address needs no resolver. The name stays if there is no route, or if the address
    is on the loopback, which would not tell others how to reach this machine.
    """
    if split_endpoint(bind)[0] not in _WILDCARDS:
        return endpoint
    host, port = split_endpoint(peer)
    seen = f"tcp://{address_towards(host, int(port))}:{split_endpoint(endpoint)[1]}"
    return endpoint if is_loopback(seen) else seen


def connect(client: Socket, endpoint: str, max_message_bytes: int, keys: CurveKeys | None) -> None:
    """Connect in the background; a message above the limit ends the connection."""
    _set_common(client)
    client.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    client.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    if keys is not None:
        client.curve_serverkey = keys.server_public
        client.curve_publickey = keys.client_public
        client.curve_secretkey = keys.client_secret
    client.connect(endpoint)


def is_loopback(endpoint: str) -> bool:
    """Whether only this machine can reach the endpoint."""
    return addresses.is_loopback(split_endpoint(endpoint)[0])


class CurveGuard:
    """Admits only this run's clients, and counts the peers that it refused. Without keys it does nothing."""

    def __init__(self, context: Context, keys: CurveKeys | None) -> None:
        """Create the guard before the sockets that it guards are bound."""
        self.refused = 0
        self._reported = 0
        self._reported_s = -REPORT_EVERY_S
        self._allowed = z85.decode(keys.client_public) if keys else b""
        self._zap: Socket | None = None
        self._monitors: list[Socket] = []
        if keys is not None:
            self._zap = context.socket(zmq.REP)
            self._zap.bind(_ZAP_ENDPOINT)

    def watch_listener(self, listener: Socket) -> None:
        """Count failed handshakes of this socket."""
        if self._zap is not None:
            self._monitors.append(listener.get_monitor_socket(_REFUSALS))

    @property
    def sockets(self) -> list[Socket]:
        """Sockets to poll; pass those that are readable to `handle`."""
        return [*self._monitors, *([self._zap] if self._zap is not None else [])]

    def handle_event(self, ready: Socket) -> None:
        """Answer one authentication request, or count one failed handshake."""
        if ready is self._zap:
            self._authenticate(ready)
        else:
            event = recv_monitor_message(ready)
            self._refuse(f"handshake failed ({zmq.Event(event['event']).name})", event["endpoint"].decode())

    def _authenticate(self, zap: Socket) -> None:
        version, request, _domain, address, _identity, mechanism, *credentials = zap.recv_multipart()
        allowed = mechanism == b"CURVE" and credentials == [self._allowed]
        if not allowed:
            self._refuse("the key is not of this run", address.decode())
        status = [b"200", b"OK"] if allowed else [b"400", b"refused"]
        zap.send_multipart([version, request, *status, b"weights", b""])

    def _refuse(self, reason: str, address: str) -> None:
        self.refused += 1
        now = time.monotonic()
        if now - self._reported_s >= REPORT_EVERY_S:
            log.warning(
                "a peer was refused: is ASYNC_GRPO_WEIGHTS_SECRET the same everywhere?",
                reason=reason,
                address=address,
                refused=self.refused - self._reported,
            )
            self._reported, self._reported_s = self.refused, now


def _set_common(made: Socket) -> None:
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
