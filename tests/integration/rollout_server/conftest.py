"""Both shared engines, one after the other, and the environment that engines change."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.vllm_lab import Lab


@pytest.fixture(params=["tied", "untied"])
def lab(request: pytest.FixtureRequest) -> Lab:
    """An engine whose output layer is the embedding, or is its own."""
    found: Lab = request.getfixturevalue(f"{request.param}_lab")
    return found


@pytest.fixture(autouse=True)
def _environment_is_left_as_found() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
