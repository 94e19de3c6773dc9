"""How weights travel from the trainer to the rollout servers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from async_grpo.config.base import NonNegativeInt, PositiveInt, Seconds, StrictModel

Endpoint = Annotated[str, Field(pattern=r"^tcp://[^:/]+:\d{1,5}$")]
Encoding = Literal["auto", "dense", "delta"]
Encryption = Literal["off", "control", "all"]


class WeightsConfig(StrictModel):
    """Weights from the trainer to the rollout servers, over ZMQ."""

    bind: Endpoint = "tcp://127.0.0.1:0"
    """Where the publisher listens (port 0: three free ones; port N: N announces, N + 1 controls, N + 2 serves)."""
    relay_bind: Endpoint = "tcp://127.0.0.1:0"
    """Where the receiver of a machine serves other machines. On the loopback it serves this machine only."""
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
    credits: PositiveInt = 8
    """Chunk requests in flight of one receiver."""
    heartbeat_s: Seconds = 0.5
    request_timeout_s: Seconds = 5.0
    """A chunk that has not come by then is asked for again, from another relay if there is one."""
    update_timeout_s: Seconds = 300.0
    """A whole update that has not come by then is an error; no engine is protected longer while it loads."""
