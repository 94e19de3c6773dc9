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
    """Transport of weights from the trainer to the rollout servers."""

    transport: Literal["zmq", "shared_filesystem", "object_store"] = "zmq"
    """`zmq`: from machine to machine over TCP. `shared_filesystem`: through a folder that all machines mount.
    `object_store`: through an S3-compatible bucket, for engines that cannot reach the trainer."""
    location: str | None = None
    """Location of the versions. `shared_filesystem`: absolute path of the folder. `object_store`: a URL such as
    `s3://BUCKET/PREFIX`; credentials come from the environment."""
    dense_every: PositiveInt = 20
    """Write every N-th version dense to `location`, and lossless differences in between. Versions older than the last
    two dense ones are deleted."""
    bind: Endpoint = "tcp://127.0.0.1:0"
    """Listening address of the publisher. It uses three ports: N for announcements, N + 1 for control and N + 2 for
    chunks. Port 0: any three free ports."""
    advertise: Host | None = None
    """Host name or address at which other machines reach the publisher, if it differs from the listening address (for
    example behind a published port). None: the host of `bind`; if that is 0.0.0.0, this machine's name."""
    relay_bind: Endpoint = "tcp://127.0.0.1:0"
    """Listening address of this machine's receiver, which relays weights to other machines. On the loopback it does
    not relay."""
    relay_advertise: Host | None = None
    """Host name or address at which other machines reach this machine's relay; set it per machine with -o. None: the
    host of `relay_bind`; if that is 0.0.0.0, the address from which this machine connects to the publisher."""
    receiver_slots: Literal[1, 2] = 2
    """Copies of the model that a rollout machine keeps in shared memory. 2: the next version arrives while engines load
    this one, and a complete one is always available. 1: half the memory; the next version replaces this one in place
    once every engine of the machine has loaded it (or after `request_timeout_s`), and an engine that starts meanwhile
    waits for it."""
    connections: PositiveInt | None = None
    """Number of parallel TCP connections of a receiver, each with a thread at both ends: one rarely carries more than
    4 GB/s. None: one per eight processors of its machine, at most 4."""
    fanout: NonNegativeInt = 2
    """Receivers that the publisher and each relay serve directly. 0: all receivers fetch from the publisher."""
    encoding: Encoding = "auto"
    """`dense`: send all bytes. `delta`: send lossless differences to the previous version, if there is one and they are
    smaller. `auto`: like `delta`, but stop encoding early if it saves less than a tenth."""
    encode_threads: PositiveInt = 2
    """Threads of the publisher for hashing and encoding."""
    encode_wait_s: Seconds = 10.0
    """Maximum seconds that the trainer waits for the encoding of the previous version; after that, the version is sent
    dense."""
    encrypt: Encryption = "off"
    """CURVE encryption. `control`: of announcements, manifests and registrations; `all`: also of chunks, at a sixth of
    the speed. Both need ASYNC_GRPO_WEIGHTS_SECRET in the environment of every process."""
    chunk_bytes: Annotated[int, Field(gt=0, multiple_of=64)] = 2 << 20
    """Size of the chunks in which weights are sent."""
    credits: PositiveInt = 8
    """Maximum number of chunk requests in flight per connection of a receiver."""
    heartbeat_s: Seconds = 0.5
    """Seconds between two heartbeats of the publisher and of every receiver, and between two reads of `location`."""
    request_timeout_s: Seconds = 5.0
    """Maximum seconds per chunk; after that it is requested again, from another relay if there is one."""
    update_timeout_s: Seconds = 300.0
    """Maximum seconds for one update; after that the receiver fails with an error. The version that an engine is
    loading is not replaced for at most this long."""

    def find_problems(self) -> Iterator[str]:
        yield from self._find_location_problems()
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

    def _find_location_problems(self) -> Iterator[str]:
        location = self.location
        if self.transport == "zmq":
            if location is not None:
                yield (
                    f"weights.location ({location}) is not used by transport zmq. Remove it, or set "
                    "weights.transport to shared_filesystem or object_store"
                )
            return

        if self.transport == "shared_filesystem":
            expected = "an absolute path that every machine mounts"
            pattern = r"/.*"
        else:
            expected = "a URL such as s3://BUCKET/PREFIX"
            pattern = r"(s3|gs|az)://[^/@?#]+(/[^@?#]*)?"
        if location is None or not re.fullmatch(pattern, location):
            yield f"weights.transport {self.transport} needs {expected}, got {location}. Set weights.location"
        if self.encrypt != "off":
            yield (
                f"weights.encrypt ({self.encrypt}) encrypts sockets, and transport {self.transport} has none: the "
                "storage controls access to weights.location. Set weights.encrypt to off"
            )
