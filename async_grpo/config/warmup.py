"""The quickstart's task and the supervised stage that makes its first policy."""

from __future__ import annotations

from async_grpo.config.base import StrictModel


class ArithmeticTaskConfig(StrictModel):
    """Placeholder until the task is written."""


class WarmupConfig(StrictModel):
    """Placeholder until the warm-up is written."""
