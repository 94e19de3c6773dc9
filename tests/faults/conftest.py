"""Shared by the tests that do something to a real run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.whole_run import WholeRun


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., WholeRun]]:
    """Starts a run: `start(*overrides, steps=..., max_tokens=...)`."""
    started: list[WholeRun] = []

    def started_with(*overrides: str, steps: int, max_tokens: int) -> WholeRun:
        started.append(WholeRun(tmp_path, steps=steps, max_tokens=max_tokens, overrides=overrides))
        started[-1].start()
        return started[-1]

    yield started_with
    for whole in started:
        whole.close()
