"""Where the trainer computes. Chosen by `trainer.platform`; there is no fallback from one to another."""

from trainer.platform.base import Platform, select_platform

__all__ = ["Platform", "select_platform"]
