"""Shared by all tests: one real Valkey and two vLLM engines a session; verifiers of tests/support."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from async_grpo.config.buffer import RedisConfig
from buffer import EmbeddedServer

if TYPE_CHECKING:
    from tests.support.vllm_lab import Lab

ROOT = Path(__file__).parents[1]


SHARED_FIXTURES = {
    "vllm": {"lab", "tied_lab", "untied_lab", "subject"},
    "ranks": {"one_rank", "two_ranks", "four_ranks"},
}
"""Group of modules -> fixtures that start for all of them what takes minutes."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a group, or else of a module, in one process of pytest-xdist. Tests that end a shared engine
    come after all others."""
    items.sort(key=lambda item: item.get_closest_marker("ends_engine") is not None)
    for item in items:
        used = set(getattr(item, "fixturenames", ()))
        groups = [group for group, fixtures in SHARED_FIXTURES.items() if fixtures & used]
        item.add_marker(pytest.mark.xdist_group(groups[0] if groups else str(item.path.relative_to(ROOT))))


@pytest.fixture
def verifiers_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of tests/support, by verifier processes."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "support"), prepend=os.pathsep)


@pytest.fixture(scope="session")
def redis_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisConfig]:
    """The configuration of a server that lives as long as the test session."""
    server = EmbeddedServer(tmp_path_factory.mktemp("valkey"), RedisConfig(max_memory_bytes=16 << 30))
    yield RedisConfig(url=server.start(), timeout_s=5.0)
    server.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tied_lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    """A real vLLM whose model has tied embeddings and stop tokens; it lives as long as the test session."""
    from tests.support.vllm_lab import STOP_TOKENS, started_lab

    async with started_lab(tmp_path_factory.mktemp("tied"), tied=True, stop_tokens=STOP_TOKENS) as lab:
        yield lab


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def untied_lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    """A real vLLM whose model has an output layer of its own and no stop token: completions are as long as asked."""
    from tests.support.vllm_lab import started_lab

    async with started_lab(tmp_path_factory.mktemp("untied"), tied=False) as lab:
        yield lab
