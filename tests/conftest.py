"""Shared by all tests: one real Valkey a session; verifiers of tests/support."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_grpo.config.buffer import RedisConfig
from buffer import EmbeddedServer


@pytest.fixture
def verifiers_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of tests/support, by verifier processes."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "support"), prepend=os.pathsep)


@pytest.fixture(scope="session")
def redis_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisConfig]:
    """The configuration of a server that lives as long as the test session."""
    server = EmbeddedServer(tmp_path_factory.mktemp("valkey"), RedisConfig())
    yield RedisConfig(url=server.start(), timeout_s=5.0)
    server.stop()
