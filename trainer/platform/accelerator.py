"""What CUDA and NPUs have in common, and any other device for which torch has a module of the same functions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from async_grpo.config import RunConfig
from async_grpo.config.trainer import TrainerConfig
from async_grpo.errors import ConfigError
from async_grpo.models.shapes import ModelShape
from async_grpo.utils.requirements import INSTALL, Check
from trainer.platform.base import MemoryUse, Platform, import_package, require_megatron, set_defaults
from trainer.platform.memory import RESERVED_BYTES, TrainerMemory, trainer_memory
from trainer.platform.probes import check_devices, check_driver, common_probes


class Accelerator(Platform, Protocol):
    """A platform with devices of its own, which torch knows as `torch.DEVICE`."""

    packages: Mapping[str, str]
    """Modules that must load, in this order, with what to type where one does not."""
    unimported: str = ""
    """What would be wrong had megatron been imported before `activate`; "" for a platform that does not change it."""
    driver_fix: str
    """What to do where the vendor's tool lists no device."""
    device_fix: str
    """What to check where torch sees no device."""
    _peak_tflops: float | None = None
    """`trainer.device_peak_tflops`."""

    def probes(self) -> Sequence[Check]:
        """Driver, devices, the packages of this platform and those that all platforms need."""
        driver, devices = (partial(check, self, self.driver_fix) for check in (check_driver, check_devices))
        return (driver, devices, *self.package_probes(), *common_probes(INSTALL[self.name]))

    def package_probes(self) -> Sequence[Check]:
        """Checks of the packages that only this platform needs."""
        ...

    def activate(self, config: TrainerConfig) -> None:
        """Take the device with this rank's number on its machine, and set the number of torch threads.

        Raises ConfigError if megatron has another version or is imported too early, or if this rank has no device of
        its own; DependencyError if a package does not load.
        """
        require_megatron(self.name, unimported=self.unimported)
        set_defaults(self.rank_environment(config))
        for module, fix in self.packages.items():
            import_package(self.name, module, fix)
        import torch

        devices, rank, variable = self._torch(), int(os.environ.get("LOCAL_RANK", "0")), self.visible_variable
        if not devices.is_available():
            raise ConfigError(
                f"trainer.platform is {self.name}, but torch sees no {self.name} device. {self.device_fix}; or set "
                "trainer.platform to cpu"
            )
        if rank >= (count := devices.device_count()):
            raise ConfigError(
                f"rank {rank} of this machine needs a {self.name} device of its own, but {count} are visible "
                f"({variable}={os.environ.get(variable, 'not set')}). Lower trainer.processes, or give more in "
                f"{variable}"
            )
        devices.set_device(rank)
        if config.device_memory_share < 1:  # of the allocator: what else takes memory is planned for
            reserved = RESERVED_BYTES / devices.get_device_properties(rank).total_memory
            devices.set_per_process_memory_fraction(max(0.0, config.device_memory_share - reserved), rank)
        torch.set_num_threads(config.threads)
        self._peak_tflops = config.device_peak_tflops

    def memory_plan(self, config: RunConfig, shape: ModelShape) -> TrainerMemory:
        """The plan of `trainer_memory`."""
        return trainer_memory(config, shape)

    def synchronize(self) -> None:
        """Wait for all streams."""
        self._torch().synchronize()

    def background_stream(self) -> Any:
        """A stream of torch."""
        return self._torch().Stream()

    def memory(self) -> MemoryUse:
        """What torch's allocator counts; the context and the buffers of the collectives are not included."""
        torch_device = self._torch()
        total_bytes = torch_device.get_device_properties(torch_device.current_device()).total_memory
        return MemoryUse(torch_device.memory_allocated(), torch_device.max_memory_allocated(), total_bytes)

    def release_memory(self) -> None:
        """Empty the cache of torch's allocator."""
        self._torch().empty_cache()

    def reset_peak_memory(self) -> None:
        """Begin a new peak of torch's allocator."""
        self._torch().reset_peak_memory_stats()

    def peak_flops(self, precision: str) -> float | None:
        """`trainer.device_peak_tflops`, else the vendor's figure for a device of this name."""
        tflops = self._peak_tflops if self._peak_tflops is not None else self.stated_tflops(precision)
        return None if tflops is None else tflops * 1e12

    def stated_tflops(self, precision: str) -> float | None:
        """Dense TFLOP/s that the vendor states for this device; None where it is not known."""
        return None

    def _torch(self) -> Any:
        import torch

        return getattr(torch, self.device)
