"""Where the trainer computes. Chosen by `trainer.platform`; there is no fallback from one to another."""

from __future__ import annotations

from async_grpo.errors import ConfigError
from trainer.platform.base import Platform

PLATFORMS = ("cpu", "cuda", "npu")


def select_platform(name: str) -> Platform:
    """The platform of that name; its framework is neither imported nor checked yet. Raises ConfigError."""
    match name:
        case "cpu":
            from trainer.platform.cpu import CpuPlatform

            return CpuPlatform()
        case "cuda":
            from trainer.platform.cuda import CudaPlatform

            return CudaPlatform()
        case "npu":
            from trainer.platform.npu import NpuPlatform

            return NpuPlatform()
    raise ConfigError(f"trainer.platform is {name!r}, and there is none of that name. Set it to cpu, cuda or npu")


__all__ = ["PLATFORMS", "Platform", "select_platform"]
