"""The server that holds the replay buffer, and how the buffer chooses."""

from __future__ import annotations

from typing import Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import model_validator

from async_grpo.config.base import PositiveInt, Seconds, StrictModel


class RedisConfig(StrictModel):
    """The server that holds the buffer."""

    url: str | None = None
    """redis://, rediss:// or unix://. None: an embedded Valkey, private to the run. A password
    comes from the environment variable ASYNC_GRPO_REDIS_PASSWORD."""
    max_memory_bytes: PositiveInt = 1 << 30
    """Of the embedded server."""
    fsync: Literal["everysec", "always"] = "everysec"
    """Of the embedded server's append-only file."""
    timeout_s: Seconds = 30.0

    @model_validator(mode="after")
    def _no_secret(self) -> RedisConfig:
        parts = urlsplit(self.url or "")
        if parts.password is not None or "password" in parse_qs(parts.query):
            raise ValueError(
                "url holds a password, and the configuration is written beside the run for everyone to read. "
                "Take it out of redis.url and set the environment variable ASYNC_GRPO_REDIS_PASSWORD"
            )
        return self
