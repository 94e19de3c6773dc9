"""How weights travel from the trainer to the rollout servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from async_grpo.config.base import NonNegativeInt, PositiveInt, Seconds, StrictModel

Endpoint = Annotated[str, Field(pattern=r"^tcp://[^:/]+:\d{1,5}$")]
Host = Annotated[str, Field(pattern=r"^[^\s:/]+$")]
Encoding = Literal["auto", "dense", "delta"]
Encryption = Literal["off", "control", "all"]


class WeightsConfig(StrictModel):
    """Weights from the trainer to the rollout servers, over ZMQ."""

    transport: Literal["zmq"] = "zmq"
    """How weights travel: `zmq` works everywhere."""
    bind: Endpoint = "tcp://127.0.0.1:0"
    """Where the publisher listens (port 0: three free ones; port N: N announces, N + 1 controls, N + 2 serves)."""
    advertise: Host | None = None
    """Under which name or address other machines reach the publisher, where that is not where it listens (behind a
    published port, say). None: the host of `bind`; of 0.0.0.0, this machine's name."""
    relay_bind: Endpoint = "tcp://127.0.0.1:0"
    """Where the receiver of a machine serves other machines. On the loopback it serves this machine only."""
    relay_advertise: Host | None = None
    """The same for the relay of this machine; to be given on each, with -o. None: the host of `relay_bind`; of 0.0.0.0,
    the address with which this machine reaches the publisher."""
    fanout: NonNegativeInt = 2
    """Copies that the publisher, and every relay, sends. 0: everybody fetches from the publisher."""
    encoding: Encoding = "auto"
    """`dense`: all bytes. `delta`: lossless differences to the version before, where there is one and they are
    shorter. `auto`: like `delta`, but an encoding that saves less than a tenth is given up early."""
    encode_threads: PositiveInt = 2
    """Threads of the publisher that hash and encode."""
    encode_wait_s: Seconds = 10.0
    """The trainer waits this long for the encoding of the version before; then that version goes dense."""
    encrypt: Encryption = "off"
    """`control`: announcements, manifests and registration under CURVE; `all`: the chunks too, at a sixth of the
    speed. Both need ASYNC_GRPO_WEIGHTS_SECRET in the environment of every process."""
    chunk_bytes: Annotated[int, Field(gt=0, multiple_of=64)] = 2 << 20
    """Size of the pieces in which weights travel."""
    credits: PositiveInt = 8
    """Chunk requests in flight of one receiver."""
    heartbeat_s: Seconds = 0.5
    """Seconds between two signs of life of the publisher and of every receiver."""
    request_timeout_s: Seconds = 5.0
    """A chunk that has not come by then is asked for again, from another relay if there is one."""
    update_timeout_s: Seconds = 300.0
    """A whole update that has not come by then is an error; no engine is protected longer while it loads."""

    def problems(self) -> Iterator[str]:
        for bind, told in (("bind", self.advertise), ("relay_bind", self.relay_advertise)):
            endpoint: str = getattr(self, bind)
            if told is not None and _on_loopback(endpoint) and not _on_loopback(f"tcp://{told}"):
                yield (
                    f"{bind} ({endpoint}) listens on the loopback only, but others would be told to come to {told}, "
                    f"where nobody answers. Set weights.{bind} to tcp://0.0.0.0:PORT, or to an address of this machine"
                )


def _on_loopback(endpoint: str) -> bool:
    return endpoint.removeprefix("tcp://").startswith(("127.", "localhost"))
