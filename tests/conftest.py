"""Shared by all tests: one real Valkey a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from async_grpo.config.buffer import RedisConfig
from buffer import EmbeddedServer


@pytest.fixture(scope="session")
def redis_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisConfig]:
    """The configuration of a server that lives as long as the test session."""
    server = EmbeddedServer(tmp_path_factory.mktemp("valkey"), RedisConfig())
    yield RedisConfig(url=server.start(), timeout_s=5.0)
    server.stop()
