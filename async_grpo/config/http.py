"""HTTP sockets of rollout servers and of the trainer."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from async_grpo.config.base import PositiveInt, Seconds, StrictModel
from async_grpo.utils.addresses import is_loopback

PORT_OFF = -1


class ListenConfig(StrictModel):
    """Address of an HTTP socket; on the loopback by default."""

    host: Annotated[str, Field(min_length=1, max_length=253)] = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=PORT_OFF, le=65535)] | None = 0
    """Port to listen on. 0: any free port. null or -1: off."""

    @property
    def is_on(self) -> bool:
        """True if a port is configured."""
        return self.port is not None and self.port != PORT_OFF


class HttpConfig(ListenConfig):
    """HTTP interface of a rollout server: health, metrics, completions of the current policy, administration."""

    host: Annotated[str, Field(min_length=1, max_length=253)] = "127.0.0.1"
    """Address to listen on. Any other address than the loopback needs ASYNC_GRPO_HTTP_KEY in the environment."""
    port: Annotated[int, Field(ge=PORT_OFF, le=65535)] | None = 0
    """Port to listen on. 0: any free port. N: N, or the next free port above it if several servers share a machine.
    null or -1: off."""
    max_concurrency: PositiveInt = 8
    """Maximum number of concurrent completions over HTTP; training has its own limit, `rollout.max_concurrency`."""
    max_tokens: PositiveInt = 4096
    """Maximum length of a completion, in tokens."""
    max_n: PositiveInt = 8
    """Maximum number of completions per request (prompts times `n`); never more than max_concurrency."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 1 << 20
    """Maximum size of a request body, in bytes."""
    request_timeout_s: Seconds = 600.0
    """Maximum seconds per request; after that it is cancelled."""
    drain_timeout_s: Seconds = 600.0
    """Seconds that a draining server waits for samples in flight. After that it saves them to the buffer and returns
    their groups, so that another server continues them."""

    @property
    def is_local(self) -> bool:
        """True if the socket is reachable from this machine only."""
        return is_loopback(self.host)

    @property
    def max_completions_per_request(self) -> int:
        """Maximum number of completions per request: max_n, but never more than max_concurrency."""
        return min(self.max_n, self.max_concurrency)
