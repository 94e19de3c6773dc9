"""The platform of the trainer: what it asks of the machine that it runs on.

    main --activate--> megatron may be imported --> process groups --model_options, layer_replacements--> model
    doctor --probes--> findings          launcher, sweep --devices--> which role gets which
    dry run --memory_plan--> bytes on one device

Nothing else in the trainer asks for the kind of device: tensors of the model and of its micro-batches live on
`device`, everything that ranks tell each other beside Megatron (bytes, integers, statistics) lives on the CPU, and
the process group's `backend` has one transport for each of the two.

No module of a platform imports torch or megatron at its top, so that `async-grpo doctor` works where neither is
installed. Devices are listed by the vendors' own tools.
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

Run = Callable[[Sequence[str]], str | None]
"""Arguments -> standard output; None if the tool is not there or failed."""


def run_tool(arguments: Sequence[str], timeout_s: float | None = None) -> str | None:
    """What the tool prints; None if it is not installed, fails or hangs for `timeout_s` (default: TOOL_TIMEOUT_S)."""
    try:
        done = subprocess.run(
            arguments, capture_output=True, text=True, timeout=timeout_s or TOOL_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


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
    """Memory of one device in bytes (on the CPU: of this process and of the machine)."""

    used_bytes: int
    peak_bytes: int
    """The most in use since `reset_peak_memory`."""
    total_bytes: int


class LayerRole(StrEnum):
    """The places of a layer that a platform may fill with classes of its own (`model/layers.py` puts them in)."""

    norm = "norm"
    rotation = "rotation"
    """Of queries and keys, a subclass of `trainer.batch.layout.Rotation`; it is no module of the layer."""
    attention = "attention"
    column_linear = "column_linear"
    row_linear = "row_linear"
    experts = "experts"
    """All experts of a rank."""


class Platform(Protocol):
    """One kind of accelerator, or none. What a platform does not define itself is that of the CPU."""

    name: str
    """Value of `trainer.platform`."""
    aliases: tuple[str, ...] = ()
    """Other names of the same devices, such as the one that vLLM uses."""
    device: str
    """torch device of parameters and micro-batches."""
    backend: str
    """torch.distributed backends, by kind of device."""
    visible_variable: str = ""
    """Environment variable that says which devices a process may use; "" for the CPU."""
    network_variables: tuple[str, ...] = ()
    """Environment variables that name the network card of its collectives, beside gloo's."""
    tool: str = ""
    """The vendor's tool that lists the devices; "" for the CPU."""
    device_files: tuple[str, ...] = ()
    """Patterns of the files in /dev by which programs reach the devices; a container may have them without the tool."""
    attention: str = "scaled_dot_product_attention, one call for all sequences of about the same length"
    """Which attention `layer_replacements` has chosen, and why; for the log."""
    experts: str = "one product for each expert and matrix (Megatron's SequentialMLP)"
    """How `layer_replacements` has chosen to compute a mixture of experts; for the log."""

    def rank_environment(self, config: TrainerConfig) -> Mapping[str, str]:
        """Environment variables of a rank, where the user does not set them."""
        ...

    def devices(self, run: Run = run_tool) -> list[Device]:
        """All devices of this machine, visible to this process or not; [] without the vendor's tool."""
        return []

    def has_devices(self, run: Run = run_tool, folder: Path = Path("/dev")) -> bool:
        """Whether this machine has a device: by its files, else by the vendor's tool."""
        return any(any(folder.glob(pattern)) for pattern in self.device_files) or bool(self.devices(run))

    def probes(self) -> Sequence[Check]:
        """Checks of devices and installation for `async-grpo doctor`, in the order in which to fix what they find."""
        ...

    def memory_plan(self, config: RunConfig, shape: ModelShape) -> TrainerMemory | None:
        """The memory that training needs on one device, at worst; None for the CPU."""
        return None

    def activate(self, config: TrainerConfig) -> None:
        """Prepare this process, once, before anything imports megatron or transformers: environment, packages, its own
        device, and what the software below Megatron has to know of the layout.

        Raises ConfigError if the device is not there, DependencyError if a package is not.
        """
        ...

    def model_options(self, *, experts: bool) -> Mapping[str, Any]:
        """Options of Megatron's `TransformerConfig` that switch on fused kernels of this platform."""
        return {}

    def layer_replacements(self, config: Any) -> Mapping[LayerRole, type]:
        """Classes that replace our own layers, for a `TransformerConfig`; {} where ours are used.

        Raises DependencyError if a package that has them is installed but does not load.
        """
        return {}

    def synchronize(self) -> None:
        """Wait until the device has finished its work, so that a clock measures it."""
        return

    def background_stream(self) -> Any:
        """Return a stream for the copies of a background thread, which do not queue behind the training's operators;
        None for the CPU."""
        return None

    def memory(self) -> MemoryUse:
        """Memory of this rank's device, now."""
        ...

    def release_memory(self) -> None:
        """Give memory that no tensor needs back to the device, for other processes; the CPU keeps it."""
        return

    def reset_peak_memory(self) -> None:
        """Begin a new measurement of the peak; does nothing where the system does not reset it."""
        return

    def peak_flops(self, precision: str) -> float | None:
        """Dense FLOP/s of one device at `precision` (float32, bfloat16); None where it is not known."""
        return None


def smallest_memory_gib(platform: Platform, run: Run = run_tool) -> float | None:
    """Memory of the smallest device of this machine; None if there are no devices."""
    return min((device.memory_gib for device in platform.devices(run)), default=None)


def visible(platform: Platform, environment: Mapping[str, str]) -> list[str] | None:
    """The devices that the environment allows, as it names them; None if it says nothing."""
    value = environment.get(platform.visible_variable)
    return None if value is None else [part.strip() for part in value.split(",") if part.strip()]


def set_defaults(environment: Mapping[str, str]) -> None:
    """Set variables that the user's environment does not set."""
    for name, value in environment.items():
        os.environ.setdefault(name, value)


def require_megatron(platform: str, *, unimported: str = "") -> None:
    """Raises ConfigError unless exactly the version of megatron-core is installed that the trainer is written for.

    `unimported`: why it must not have been imported yet; "" for a platform that does not change it.
    """
    if unimported and "megatron.core" in sys.modules:
        raise ConfigError(
            f"the {platform} platform must be activated before megatron is imported, and it already is: {unimported}. "
            "Activate the platform first thing in the process"
        )
    found = installed("megatron-core")
    if found != MEGATRON_CORE:
        raise ConfigError(
            f"the {platform} platform is written for megatron-core {MEGATRON_CORE}, but {found or 'none'} is "
            f"installed. Run: {INSTALL[platform]}"
        )


def import_package(platform: str, module: str, fix: str) -> Any:
    """Import a package that the platform needs. Raises DependencyError with what to type if it does not load."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a library that was built for another torch
        raise DependencyError(
            f"trainer.platform is {platform}, but {module} cannot be imported ({type(error).__name__}: {error}). "
            f"Run: {fix}"
        ) from error
