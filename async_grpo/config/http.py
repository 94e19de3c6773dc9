"""What rollout servers and the trainer offer over HTTP."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import Field

from async_grpo.config.base import PositiveInt, Seconds, StrictModel

PORT_OFF = -1


class ListenConfig(StrictModel):
    """A socket for HTTP; on the loopback unless told otherwise."""

    host: Annotated[str, Field(min_length=1, max_length=253)] = "127.0.0.1"
    """Where it listens."""
    port: Annotated[int, Field(ge=PORT_OFF, le=65535)] | None = 0
    """0: any free one. null or -1: off."""

    @property
    def is_on(self) -> bool:
        """Whether the socket is opened at all."""
        return self.port is not None and self.port != PORT_OFF


class HttpConfig(ListenConfig):
    """Health, metrics, completions of the current policy, administration."""

    host: Annotated[str, Field(min_length=1, max_length=253)] = "127.0.0.1"
    """Where it listens. Anything but the loopback needs ASYNC_GRPO_HTTP_KEY in the environment."""
    port: Annotated[int, Field(ge=PORT_OFF, le=65535)] | None = 0
    """0: any free one. N: N, or the next free one above it where several servers share a machine. null or -1: off."""
    max_concurrency: PositiveInt = 8
    """Completions that are generated for HTTP at once, at most; training has its own `rollout.max_concurrency`."""
    max_tokens: PositiveInt = 4096
    """Most tokens of one completion."""
    max_n: PositiveInt = 8
    """Completions of one request (prompts times `n`), at most; never more than max_concurrency."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 1 << 20
    """Most bytes of a request body."""
    request_timeout_s: Seconds = 600.0
    """A request that is not answered by then is given up."""
    drain_timeout_s: Seconds = 600.0
    """A server that is drained waits this long for what is in flight; then that is stored and given back."""

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def most_completions(self) -> int:
        """The most completions of one request: max_n, but never more than max_concurrency."""
        return min(self.max_n, self.max_concurrency)
