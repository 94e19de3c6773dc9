"""The interface between the trainer and the kind of device it runs on.

    main --activate--> megatron may be imported --> process groups --model_options, layer_replacements--> model
    doctor --probes--> findings          launcher, sweep --list_devices--> devices per role
    dry run --memory_plan--> bytes on one device

The rest of the trainer does not depend on the kind of device. Tensors of the model and of its micro-batches are on
`device`. Everything else that ranks exchange (bytes, integers, statistics) is on the CPU. The process group's `backend`
has one transport for each.

No platform module imports torch or megatron at its top, so that `async-grpo doctor` works where neither is installed.
Devices are listed with the vendors' tools for the same reason.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from async_grpo.config import RunConfig
from async_grpo.config.trainer import TrainerConfig
from async_grpo.errors import ConfigError, DependencyError
from async_grpo.models.shapes import ModelShape
from async_grpo.utils.requirements import (
    INSTALL,
    MEGATRON_CORE,
    Check,
    installed,
)
from trainer.platform.memory import TrainerMemory

TOOL_TIMEOUT_S = 20.0
"""Seconds to wait for a vendor's tool."""

RunTool = Callable[[Sequence[str]], str | None]
"""Arguments -> standard output; None if the tool is missing or fails."""


def run_tool(arguments: Sequence[str], timeout_s: float | None = None) -> str | None:
    """Return what the tool prints; None if it is missing, fails or hangs for `timeout_s` (default: TOOL_TIMEOUT_S)."""
    timeout_s = timeout_s or TOOL_TIMEOUT_S
    try:
        result = subprocess.run(arguments, capture_output=True, text=True, timeout=timeout_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, as the vendor's tool lists it."""

    index: int
    name: str
    memory_gib: float
    driver: str
    health: str = "OK"


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of one device in bytes. On the CPU: used by this process, total of the machine."""

    used_bytes: int
    peak_bytes: int
    """Maximum use since `reset_peak_memory`."""
    total_bytes: int


class LayerRole(StrEnum):
    """Parts of a layer that a platform may replace. `trainer/model/layers.py` inserts the replacements."""

    norm = "norm"
    rotation = "rotation"
    """Rotary embedding of queries and keys: a subclass of `trainer.batch.layout.Rotation`, not a module."""
    attention = "attention"
    column_linear = "column_linear"
    row_linear = "row_linear"
    experts = "experts"
    """All experts of a rank."""


class Platform(Protocol):
    """One kind of accelerator, or the CPU. The defaults are those of the CPU."""

    name: str
    """Value of `trainer.platform`."""
    aliases: tuple[str, ...] = ()
    """Other names of the same devices, such as vLLM's."""
    device: str
    """torch device of parameters and micro-batches."""
    backend: str
    """torch.distributed backends, by kind of device."""
    visible_variable: str = ""
    """Environment variable that restricts a process to some devices; "" for the CPU."""
    network_variables: tuple[str, ...] = ()
    """Environment variables for the network card of its collectives, besides gloo's."""
    tool: str = ""
    """The vendor's tool that lists the devices; "" for the CPU."""
    device_files: tuple[str, ...] = ()
    """Patterns of the device files in /dev. A container may have them without the vendor's tool."""
    attention: str = "scaled_dot_product_attention, one call for all sequences of about the same length"
    """The attention chosen by `layer_replacements`, with the reason; for the log."""
    experts: str = "one product for each expert and matrix (Megatron's SequentialMLP)"
    """The implementation of a mixture of experts chosen by `layer_replacements`; for the log."""

    def rank_environment(self, config: TrainerConfig) -> Mapping[str, str]:
        """Return environment variables for a rank. Values that the user sets take precedence."""
        ...

    def list_devices(self, run: RunTool = run_tool) -> list[Device]:
        """Return all devices of this machine, visible to this process or not; [] without the vendor's tool."""
        return []

    def has_devices(self, run: RunTool = run_tool, folder: Path = Path("/dev")) -> bool:
        """True if this machine has a device file, or the vendor's tool lists a device."""
        return any(any(folder.glob(pattern)) for pattern in self.device_files) or bool(self.list_devices(run))

    def probes(self) -> Sequence[Check]:
        """Return the checks of devices and installation for `async-grpo doctor`, in the order to fix them."""
        ...

    def memory_plan(self, config: RunConfig, shape: ModelShape) -> TrainerMemory | None:
        """Return the maximum memory that training needs on one device; None for the CPU."""
        return None

    def activate(self, config: TrainerConfig) -> None:
        """Prepare this process: environment variables, packages, this rank's device.

        Call once, before megatron or transformers is imported: some platforms patch or configure them. Raises
        ConfigError if the device is missing, DependencyError if a package is missing.
        """
        ...

    def model_options(self, *, experts: bool) -> Mapping[str, Any]:
        """Return options of Megatron's `TransformerConfig` that enable fused kernels of this platform."""
        return {}

    def layer_replacements(self, config: Any) -> Mapping[LayerRole, type]:
        """Return the classes that replace our own layers, for a `TransformerConfig`; {} if there are none.

        Raises DependencyError if a package that has them is installed but does not load.
        """
        return {}

    def synchronize(self) -> None:
        """Wait until the device has finished its queued work. Call before reading a clock."""
        return

    def background_stream(self) -> Any:
        """Return a stream for copies in a background thread; None for the CPU.

        Copies in this stream do not queue behind the operators of the training thread.
        """
        return None

    def memory_use(self) -> MemoryUse:
        """Return the current memory use of this rank's device."""
        ...

    def release_memory(self) -> None:
        """Return unused memory to the device, for other processes. The CPU keeps it."""
        return

    def reset_peak_memory(self) -> None:
        """Start a new measurement of the peak. Does nothing on the CPU: Linux does not reset it."""
        return

    def peak_flops(self, precision: str) -> float | None:
        """Dense FLOP/s of one device at `precision` (float32, bfloat16); None if unknown."""
        return None


def smallest_device_gib(platform: Platform, run: RunTool = run_tool) -> float | None:
    """Memory of the smallest device of this machine; None if there are no devices."""
    return min((device.memory_gib for device in platform.list_devices(run)), default=None)


def visible_devices(platform: Platform, environment: Mapping[str, str]) -> list[str] | None:
    """Device identifiers that the environment allows, as written there; None if the variable is not set."""
    value = environment.get(platform.visible_variable)
    if value is None:
        return None
    return [part.strip() for part in value.split(",") if part.strip()]


def set_defaults(environment: Mapping[str, str]) -> None:
    """Set variables that the user's environment does not set."""
    for name, value in environment.items():
        os.environ.setdefault(name, value)


def require_megatron(platform: str, *, unimported: str = "") -> None:
    """Raise ConfigError unless megatron-core has exactly the version that the trainer is written for.

    `unimported`: reason why it must not have been imported yet; "" for a platform that does not patch it.
    """
    if unimported and "megatron.core" in sys.modules:
        raise ConfigError(
            f"the {platform} platform must be activated before megatron is imported, and it already is: {unimported}. "
            "Activate the platform first thing in the process"
        )
    version = installed("megatron-core")
    if version != MEGATRON_CORE:
        raise ConfigError(
            f"the {platform} platform is written for megatron-core {MEGATRON_CORE}, but {version or 'none'} is "
            f"installed. Run: {INSTALL[platform]}"
        )


def import_package(platform: str, module: str, fix: str) -> Any:
    """Import a package that the platform needs. Raises DependencyError with the command `fix` if it does not load."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a library that was built for another torch
        raise DependencyError(
            f"trainer.platform is {platform}, but {module} cannot be imported ({type(error).__name__}: {error}). "
            f"Run: {fix}"
        ) from error
