"""The kinds of device that the trainer runs on: CPU, CUDA GPUs and Ascend NPUs.

`trainer.platform` selects one. There is no fallback: a missing device is an error.

    base               the Platform interface, and helpers that import no framework
    cpu, cpu_patches   Megatron on CPUs, and what that replaces in torch and Megatron
    accelerator        what CUDA and NPU have in common
    cuda, npu          NVIDIA GPUs; Ascend NPUs through MindSpeed
    fused_layers       attention and rotary embeddings for packed sequences
    grouped_experts    the experts of a rank as two grouped matrix products
    memory             memory plan of one device and of one node
    probes             checks for `async-grpo doctor`
"""

from __future__ import annotations

from async_grpo.errors import ConfigError
from trainer.platform.base import Platform


def list_platforms() -> tuple[Platform, ...]:
    """Return all platforms. Imports their modules, none of which imports torch or its framework."""
    from trainer.platform.cpu import CpuPlatform
    from trainer.platform.cuda import CudaPlatform
    from trainer.platform.npu import NpuPlatform

    return CpuPlatform(), CudaPlatform(), NpuPlatform()


def select_platform(name: str) -> Platform:
    """Return the platform with that name or alias, without importing its framework. Raises ConfigError."""
    platforms = list_platforms()
    for platform in platforms:
        if name in (platform.name, *platform.aliases):
            return platform

    *others, last = (platform.name for platform in platforms)
    raise ConfigError(f"there is no platform {name!r}. Set trainer.platform to {', '.join(others)} or {last}")


__all__ = ["Platform", "list_platforms", "select_platform"]
