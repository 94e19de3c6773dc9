"""What the trainer asks of the machine it runs on.

    main --activate--> megatron may be imported --configure--> process groups --layer_spec--> model

Nothing else in the trainer asks for the kind of device: tensors of the model and of its micro-batches live on
`device`, everything that ranks tell each other beside Megatron (bytes, integers, statistics) lives on the CPU, and
the process group's `backend` has one transport for each of the two.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Protocol

from async_grpo.config.trainer import TrainerConfig
from async_grpo.errors import ConfigError, DependencyError
from async_grpo.versions import INSTALL_MEGATRON, MEGATRON_CORE, installed


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of one device (or, on the CPU, of this process and of the machine)."""

    used_bytes: int
    peak_bytes: int
    """Most that was in use since `reset_peak_memory`."""
    total_bytes: int


class Platform(Protocol):
    """One kind of accelerator (or none)."""

    name: str
    device: str
    """torch device of parameters and micro-batches."""
    backend: str
    """torch.distributed backends, by kind of device."""

    def activate(self, threads: int) -> None:
        """Make this process ready, once, before anything imports megatron: environment, packages, its own device.

        Raises ConfigError if the device is not there, DependencyError if a package is not.
        """
        ...

    def configure(self, config: TrainerConfig) -> None:
        """Tell what stands below Megatron how the ranks are cut; before Megatron's groups are made."""
        ...

    def layer_spec(self, config: Any) -> Any:
        """The Megatron block spec (`TransformerBlockSubmodules`) for a `TransformerConfig`."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done what it was given, so that a clock measures it."""
        ...

    def memory(self) -> MemoryUse:
        """Of this rank's device, now."""
        ...

    def reset_peak_memory(self) -> None:
        """Begin a new measurement of the peak."""
        ...

    def peak_flops(self, precision: str) -> float | None:
        """Dense FLOP/s of one device at `precision` (float32, bfloat16); None where it is not known."""
        ...


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


def local_rank() -> int:
    """Which of this machine's ranks this is; 0 for one that was started by itself."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def set_defaults(environment: dict[str, str]) -> None:
    """Where the user's own environment has not said otherwise."""
    for name, value in environment.items():
        os.environ.setdefault(name, value)


def require_megatron(platform: str) -> None:
    """Raises ConfigError for another version than the one that the trainer is written for, or none."""
    found = installed("megatron-core")
    if found != MEGATRON_CORE:
        raise ConfigError(
            f"the {platform} platform is written for megatron-core {MEGATRON_CORE}, but {found or 'none'} is "
            f"installed. Run: {INSTALL_MEGATRON}"
        )


def require_own_device(platform: str, rank: int, devices: int, variable: str) -> None:
    """Raises ConfigError if this rank has no device of its own among those that are visible."""
    if rank >= devices:
        raise ConfigError(
            f"rank {rank} of this machine needs a {platform} device of its own, but {devices} are visible "
            f"({variable}={os.environ.get(variable, 'not set')}). Lower trainer.processes, or give more in {variable}"
        )


def missing(platform: str, package: str, error: Exception, fix: str) -> DependencyError:
    """What to raise when a package cannot be imported."""
    why = f"{type(error).__name__}: {error}"
    return DependencyError(f"trainer.platform is {platform}, but {package} cannot be imported ({why}). Run: {fix}")
