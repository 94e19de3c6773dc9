"""How weights travel from the trainer to the rollout servers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from async_grpo.config.base import PositiveInt, Seconds, StrictModel


class WeightsConfig(StrictModel):
    """Weights from the trainer to the rollout servers, over ZMQ."""

    bind: Annotated[str, Field(pattern=r"^tcp://[^:/]+:\d{1,5}$")] = "tcp://127.0.0.1:0"
    """Where the publisher listens (port 0: two free ones; port N: N announces, N + 1 serves)."""
    chunk_bytes: PositiveInt = 1 << 20
    credits: PositiveInt = 4
    """Chunk requests in flight of one receiver."""
    heartbeat_s: Seconds = 0.5
    request_timeout_s: Seconds = 5.0
    """A chunk that has not come by then is asked for again."""
    update_timeout_s: Seconds = 300.0
    """A whole update that has not come by then is an error."""
