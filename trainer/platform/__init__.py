"""Where the trainer computes. Chosen by `trainer.platform`; there is no fallback from one to another."""

from __future__ import annotations

from async_grpo.errors import ConfigError
from trainer.platform.base import Platform


def select_platform(name: str) -> Platform:
    """The platform of that name; nothing of it is imported or checked yet. Raises ConfigError."""
    if name == "cpu":
        from trainer.platform.cpu import CpuPlatform

        return CpuPlatform()
    if name == "cuda":
        from trainer.platform.cuda import CudaPlatform

        return CudaPlatform()
    if name == "npu":
        from trainer.platform.npu import NpuPlatform

        return NpuPlatform()
    raise ConfigError(f"trainer.platform is {name!r}, and there is none of that name. Set it to cpu, cuda or npu")


__all__ = ["Platform", "select_platform"]
