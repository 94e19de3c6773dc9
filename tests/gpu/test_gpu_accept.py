"""`async-grpo accept --platform cuda`: what a user with a GPU runs first."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from async_grpo.lab.accept.accept import accept


@pytest.mark.timeout(1800)
def test_every_stage_passes(tmp_path: Path) -> None:
    report = asyncio.run(accept("cuda", tmp_path))
    assert report.ok, report.text()
