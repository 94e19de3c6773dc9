"""ZMQ sockets of the transport: binding, connecting, CURVE encryption, refused peers.

The process answers ZMQ's authentication requests (ZAP) itself and admits only the client key of this run. Peers without
this run's server key fail earlier, in the handshake. Both are logged, at most once per `REPORT_EVERY_S`.

All keys are derived from one shared secret:

    ASYNC_GRPO_WEIGHTS_SECRET --scrypt--> 64 bytes = secret key of the servers | secret key of the clients

Any 32 bytes are a valid Curve25519 secret key, so the two halves are used as they are, and both sides derive the same
four keys without exchanging any. An attacker who records a handshake can test guesses of the secret against it; scrypt
makes each guess cost tens of milliseconds and 16 MiB. The salt is fixed, because the two sides share nothing else
before they connect. Use a different secret for each run.
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
"""Number of missed heartbeats after which a peer counts as lost."""
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
    """Two key pairs, encoded as Z85 text for ZMQ. All servers of a run share one pair, all clients the other."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    def __repr__(self) -> str:
        return "CurveKeys(...)"


def keys_for(config: WeightsConfig) -> CurveKeys | None:
    """Keys of this run; None if encryption is off. Raises ConfigError if the secret is missing or too short."""
    if config.encrypt == "off":
        return None
    secret = os.environ.get(SECRET_VARIABLE, "")
    if len(secret) < MIN_SECRET_CHARACTERS:
        raise ConfigError(
            f"weights.encrypt is {config.encrypt!r}, but {SECRET_VARIABLE} has {len(secret)} characters; at least "
            f"{MIN_SECRET_CHARACTERS} are needed. Set it to the same random text for the trainer and every rollout "
            "server (openssl rand -hex 32)"
        )
    return derive_keys(secret)


def derive_keys(secret: str) -> CurveKeys:
    """Derive the keys from the secret. Every machine gets the same keys."""
    secret_keys = hashlib.scrypt(secret.encode(), salt=_SALT, n=1 << 14, r=8, p=1, dklen=2 * _KEY_BYTES)
    server_secret = z85.encode(secret_keys[:_KEY_BYTES])
    client_secret = z85.encode(secret_keys[_KEY_BYTES:])
    return CurveKeys(
        server_public=zmq.curve_public(server_secret),
        server_secret=server_secret,
        client_public=zmq.curve_public(client_secret),
        client_secret=client_secret,
    )


def connection_count(config: WeightsConfig) -> int:
    """Number of connections, and of ZMQ I/O threads, for chunks: `weights.connections`, or derived from the cores."""
    if config.connections:
        return config.connections
    cores = len(os.sched_getaffinity(0))
    return max(1, min(MAX_CONNECTIONS, cores // CORES_PER_CONNECTION))


def listen(listener: Socket, bind: str, port_offset: int, keys: CurveKeys | None, advertise: str | None = None) -> str:
    """Bind to the port of `bind` plus `port_offset`, or to any free port if it is 0. Returns the endpoint for peers.

    The endpoint's host is `advertise` if it is set, this machine's name if `bind` is a wildcard, else the host of
    `bind`.
    """
    _set_common_options(listener)
    if keys is not None:
        listener.curve_server = True
        listener.curve_secretkey = keys.server_secret
        listener.zap_domain = _DOMAIN
    host, port = split_endpoint(bind)
    listener.bind(f"tcp://{host}:{int(port) + port_offset if int(port) else '*'}")
    _, bound_port = split_endpoint(listener.getsockopt_string(zmq.LAST_ENDPOINT))

    if advertise:
        host = advertise
    elif host in _WILDCARDS:
        host = socket.gethostname()
    return f"tcp://{host}:{bound_port}"


def reachable_endpoint(peer: str, endpoint: str, bind: str) -> str:
    """Return `endpoint` with this machine's address on the route to `peer`, if `bind` is a wildcard.

    Unlike the machine's name, that address needs no name resolution. Returns `endpoint` unchanged if the address is a
    loopback address, at which other machines cannot reach this one.
    """
    if split_endpoint(bind)[0] not in _WILDCARDS:
        return endpoint
    peer_host, peer_port = split_endpoint(peer)
    _, own_port = split_endpoint(endpoint)
    reachable = f"tcp://{address_towards(peer_host, int(peer_port))}:{own_port}"
    return endpoint if is_loopback(reachable) else reachable


def connect(client: Socket, endpoint: str, max_message_bytes: int, keys: CurveKeys | None) -> None:
    """Connect in the background. A message above `max_message_bytes` closes the connection."""
    _set_common_options(client)
    client.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    client.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    if keys is not None:
        client.curve_serverkey = keys.server_public
        client.curve_publickey = keys.client_public
        client.curve_secretkey = keys.client_secret
    client.connect(endpoint)


def is_loopback(endpoint: str) -> bool:
    """True if only this machine can reach the endpoint."""
    return addresses.is_loopback(split_endpoint(endpoint)[0])


class CurveGuard:
    """Admits only this run's clients, and counts refused peers. Without keys it does nothing."""

    def __init__(self, context: Context, keys: CurveKeys | None) -> None:
        """Create the guard before its sockets are bound: ZMQ looks for the ZAP handler at each connection, and admits
        every key if there is none."""
        self.refused = 0
        self._refused_at_report = 0
        self._reported_s = -REPORT_EVERY_S
        self._allowed_key = z85.decode(keys.client_public) if keys else b""
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
        """Sockets to poll. Pass readable ones to `handle_event`."""
        if self._zap is None:
            return []
        return [*self._monitors, self._zap]

    def handle_event(self, ready: Socket) -> None:
        """Answer one authentication request, or count one failed handshake."""
        if ready is self._zap:
            self._authenticate(ready)
        else:
            event = recv_monitor_message(ready)
            self._count_refused(f"handshake failed ({zmq.Event(event['event']).name})", event["endpoint"].decode())

    def _authenticate(self, zap: Socket) -> None:
        version, request, _domain, address, _identity, mechanism, *credentials = zap.recv_multipart()
        is_allowed = mechanism == b"CURVE" and credentials == [self._allowed_key]
        if not is_allowed:
            self._count_refused("the key is not of this run", address.decode())
        status = [b"200", b"OK"] if is_allowed else [b"400", b"refused"]
        zap.send_multipart([version, request, *status, b"weights", b""])

    def _count_refused(self, reason: str, address: str) -> None:
        self.refused += 1
        now = time.monotonic()
        if now - self._reported_s >= REPORT_EVERY_S:
            log.warning(
                "a peer was refused: is ASYNC_GRPO_WEIGHTS_SECRET the same everywhere?",
                reason=reason,
                address=address,
                refused=self.refused - self._refused_at_report,
            )
            self._refused_at_report = self.refused
            self._reported_s = now


def _set_common_options(zmq_socket: Socket) -> None:
    zmq_socket.setsockopt(zmq.LINGER, 0)
    zmq_socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    zmq_socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
