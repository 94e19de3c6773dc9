"""Shared by the tests of the buffer on real servers."""

from __future__ import annotations

import uuid

import pytest


@pytest.fixture
def run() -> str:
    """The name of a run that no other test has."""
    return uuid.uuid4().hex
