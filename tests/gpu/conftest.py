"""Everything here needs one CUDA GPU, and is skipped, with the reason, where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU, skip what lies in this folder."""
    if torch.cuda.is_available():
        return
    reason = f"no CUDA GPU: torch {torch.__version__} sees none (make test-gpu on a machine that has one)"
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
