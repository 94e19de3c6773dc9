"""Transport of weights from the trainer to the rollout servers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from async_grpo.config.base import NonNegativeInt, PositiveInt, Seconds, StrictModel
from async_grpo.utils.addresses import is_loopback, split_endpoint

Endpoint = Annotated[str, Field(pattern=r"^tcp://[^:/]+:\d{1,5}$")]
Host = Annotated[str, Field(pattern=r"^[^\s:/]+$")]
Encoding = Literal["auto", "dense", "delta"]
Encryption = Literal["off", "control", "all"]


class WeightsConfig(StrictModel):
    """Weights from the trainer to the rollout servers."""

    transport: Literal["zmq", "shared_filesystem", "object_store"] = "zmq"
    """Transport of weights. `zmq`: from machine to machine over TCP. `shared_filesystem`: through a folder that all
    machines mount. `object_store`: through an S3-compatible bucket, for engines that cannot reach the trainer."""
    location: str | None = None
    """Location of versions: for `shared_filesystem` the absolute path of the folder, for `object_store` a URL such as
    `s3://BUCKET/PREFIX`; its credentials come from the environment."""
    dense_every: PositiveInt = 20
    """Versions between two that are written dense in `location`; the others are lossless differences. Versions below
    the last two dense ones are removed."""
    bind: Endpoint = "tcp://127.0.0.1:0"
    """Address of the publisher (port 0: three free ones; port N: N announces, N + 1 controls, N + 2 serves)."""
    advertise: Host | None = None
    """Name or address at which other machines reach the publisher, if that is not where it listens (for example behind
    a published port). None: the host of `bind`; if that is 0.0.0.0, this machine's name."""
    relay_bind: Endpoint = "tcp://127.0.0.1:0"
    """Address of this machine's receiver for other machines. On the loopback it serves only this machine."""
    relay_advertise: Host | None = None
    """The same for the relay of this machine; set it on each machine with -o. None: the host of `relay_bind`; if that
    is 0.0.0.0, the address with which this machine reaches the publisher."""
    receiver_slots: Literal[1, 2] = 2
    """Copies of the model that a rollout machine keeps in shared memory. 2: the next version arrives while engines load
    this one, and a complete one is always available. 1: half the memory; the next version replaces this one in place
    once every engine of the machine has loaded it (or after `request_timeout_s`), and an engine that starts meanwhile
    waits for it."""
    connections: PositiveInt | None = None
    """Number of parallel TCP connections of a receiver, each with a thread at both ends: one rarely carries more than
    4 GB/s. None: one per eight processors of its machine, at most 4."""
    fanout: NonNegativeInt = 2
    """Copies that the publisher and every relay send. 0: all receivers fetch from the publisher."""
    encoding: Encoding = "auto"
    """`dense`: all bytes. `delta`: lossless differences to the version before, where there is one and they are
    shorter. `auto`: like `delta`, but an encoding that saves less than a tenth is given up early."""
    encode_threads: PositiveInt = 2
    """Threads of the publisher that hash and encode."""
    encode_wait_s: Seconds = 10.0
    """Seconds that the trainer waits for the encoding of the previous version; after that, that version is sent
    dense."""
    encrypt: Encryption = "off"
    """`control`: announcements, manifests and registration under CURVE; `all`: the chunks too, at a sixth of the
    speed. Both need ASYNC_GRPO_WEIGHTS_SECRET in the environment of every process."""
    chunk_bytes: Annotated[int, Field(gt=0, multiple_of=64)] = 2 << 20
    """Size of the chunks in which weights are sent."""
    credits: PositiveInt = 8
    """Maximum number of chunk requests in flight per connection of a receiver."""
    heartbeat_s: Seconds = 0.5
    """Seconds between two heartbeats of the publisher and of every receiver, and between two reads of `location`."""
    request_timeout_s: Seconds = 5.0
    """Seconds for one chunk; after that it is requested again, from another relay if there is one."""
    update_timeout_s: Seconds = 300.0
    """Seconds for a whole update; after that it is an error. An engine that loads weights is protected for at most this
    long."""

    def problems(self) -> Iterator[str]:
        yield from self._problems_of_location()
        for bind, advertised in (("bind", self.advertise), ("relay_bind", self.relay_advertise)):
            endpoint: str = getattr(self, bind)
            if advertised is None or is_loopback(advertised):
                continue
            if is_loopback(split_endpoint(endpoint)[0]):
                yield (
                    f"{bind} ({endpoint}) listens on the loopback only, but other machines would connect to "
                    f"{advertised}, where nothing listens. Set weights.{bind} to tcp://0.0.0.0:PORT, or to an address "
                    "of this machine"
                )

    def _problems_of_location(self) -> Iterator[str]:
        location = self.location
        if self.transport == "zmq":
            if location is not None:
                yield (
                    f"weights.location ({location}) is not used by transport zmq. Remove it, or set "
                    "weights.transport to shared_filesystem or object_store"
                )
            return
        wanted, pattern = {
            "shared_filesystem": ("an absolute path that every machine mounts", r"/.*"),
            "object_store": ("a URL such as s3://BUCKET/PREFIX", r"(s3|gs|az)://[^/@?#]+(/[^@?#]*)?"),
        }[self.transport]
        if location is None or not re.fullmatch(pattern, location):
            yield f"weights.transport {self.transport} needs {wanted}, got {location}. Set weights.location"
        if self.encrypt != "off":
            yield (
                f"weights.encrypt ({self.encrypt}) encrypts sockets, and transport {self.transport} has none: the "
                "storage controls access to weights.location. Set weights.encrypt to off"
            )
