"""Where the trainer computes. Chosen by `trainer.platform`; there is no fallback from one to another."""

from __future__ import annotations

from async_grpo.errors import ConfigError
from trainer.platform.base import Platform


def platforms() -> tuple[Platform, ...]:
    """All platforms. This imports their modules, none of which imports torch or its framework."""
    from trainer.platform.cpu import CpuPlatform
    from trainer.platform.cuda import CudaPlatform
    from trainer.platform.npu import NpuPlatform

    return CpuPlatform(), CudaPlatform(), NpuPlatform()


def select_platform(name: str) -> Platform:
    """The platform with that name or alias; its framework is neither imported nor checked yet. Raises ConfigError."""
    known = platforms()
    for platform in known:
        if name in (platform.name, *platform.aliases):
            return platform
    *others, last = (platform.name for platform in known)
    raise ConfigError(f"there is no platform {name!r}. Set trainer.platform to {', '.join(others)} or {last}")


__all__ = ["Platform", "platforms", "select_platform"]
