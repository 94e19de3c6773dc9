"""Common base of CUDA and NPU: devices for which torch has a module with the functions of `torch.cuda`."""

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
    """A platform whose devices have a torch module: `torch.cuda`, `torch.npu`."""

    packages: Mapping[str, str]
    """Modules that must load, in this order -> the command that installs them."""
    unimported: str = ""
    """Consequence of importing megatron before `activate`, for the error message; "" if there is none."""
    driver_fix: str
    """Advice if the vendor's tool lists no device."""
    device_fix: str
    """Advice if torch sees no device."""
    _peak_tflops: float | None = None
    """`trainer.device_peak_tflops`."""

    def probes(self) -> Sequence[Check]:
        """Check the driver, the devices, the packages of this platform and those of all platforms."""
        return (
            partial(check_driver, self, self.driver_fix),
            partial(check_devices, self, self.driver_fix),
            *self.package_probes(),
            *common_probes(INSTALL[self.name]),
        )

    def package_probes(self) -> Sequence[Check]:
        """Return the checks of packages that only this platform needs."""
        ...

    def activate(self, config: TrainerConfig) -> None:
        """Select the device with this rank's local number and set the number of torch threads.

        Raises ConfigError if megatron has another version or is imported too early, or if there is no device for this
        rank; DependencyError if a package does not load.
        """
        require_megatron(self.name, unimported=self.unimported)

        # Allocators and collectives read their variables when their library loads, so set them before the imports.
        set_defaults(self.rank_environment(config))
        for module, fix in self.packages.items():
            import_package(self.name, module, fix)
        import torch

        torch_device = self._torch_device()
        if not torch_device.is_available():
            raise ConfigError(
                f"trainer.platform is {self.name}, but torch sees no {self.name} device. {self.device_fix}; or set "
                "trainer.platform to cpu"
            )
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        count = torch_device.device_count()
        if rank >= count:
            variable = self.visible_variable
            raise ConfigError(
                f"rank {rank} of this machine needs a {self.name} device of its own, but {count} are visible "
                f"({variable}={os.environ.get(variable, 'not set')}). Lower trainer.processes, or give more in "
                f"{variable}"
            )

        torch_device.set_device(rank)
        if config.device_memory_share < 1:
            # The fraction limits torch's allocator alone. Context, workspaces and collectives need memory besides, so
            # subtract what the memory plan reserves for them.
            reserved = RESERVED_BYTES / torch_device.get_device_properties(rank).total_memory
            torch_device.set_per_process_memory_fraction(max(0.0, config.device_memory_share - reserved), rank)
        torch.set_num_threads(config.threads)
        self._peak_tflops = config.device_peak_tflops

    def memory_plan(self, config: RunConfig, shape: ModelShape) -> TrainerMemory:
        """Return the plan of `trainer_memory`."""
        return trainer_memory(config, shape)

    def synchronize(self) -> None:
        """Wait for all streams."""
        self._torch_device().synchronize()

    def background_stream(self) -> Any:
        """Return a new torch stream."""
        return self._torch_device().Stream()

    def memory_use(self) -> MemoryUse:
        """Memory counted by torch's allocator, without the context and the buffers of the collectives."""
        torch_device = self._torch_device()
        properties = torch_device.get_device_properties(torch_device.current_device())
        return MemoryUse(
            used_bytes=torch_device.memory_allocated(),
            peak_bytes=torch_device.max_memory_allocated(),
            total_bytes=properties.total_memory,
        )

    def release_memory(self) -> None:
        """Empty the cache of torch's allocator."""
        self._torch_device().empty_cache()

    def reset_peak_memory(self) -> None:
        """Reset the peak of torch's allocator."""
        self._torch_device().reset_peak_memory_stats()

    def peak_flops(self, precision: str) -> float | None:
        """`trainer.device_peak_tflops`, or the value in the vendor's data sheet."""
        tflops = self._peak_tflops
        if tflops is None:
            tflops = self.stated_tflops(precision)
        return None if tflops is None else tflops * 1e12

    def stated_tflops(self, precision: str) -> float | None:
        """Dense TFLOP/s of this device in the vendor's data sheet; None if unknown."""
        return None

    def _torch_device(self) -> Any:
        import torch

        return getattr(torch, self.device)
