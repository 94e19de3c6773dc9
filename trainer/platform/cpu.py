"""Megatron-core on CPU: the calls to torch.cuda that it makes are answered by the CPU.

Megatron-core has no CPU backend, but all its parallelism (tensor, pipeline, data, distributed
optimizer) is torch and torch.distributed. `CpuPlatform.activate` replaces the few CUDA entry points
that it uses. That depends on internals of one version, so the version is checked exactly, and the
replacement happens only in a process that asked for it and before megatron is imported.
"""

from __future__ import annotations

import resource
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import psutil
import torch
import torch.utils._device

from async_grpo.config.trainer import TrainerConfig
from async_grpo.errors import ConfigError
from async_grpo.utils.private_names import check_private_names
from trainer.platform.base import LayerRole, MemoryUse, require_megatron
from trainer.platform.cpu_patches import (
    _answer_device_queries,
    _answer_random_state,
    _patch_megatron_experts,
    _patch_megatron_random,
    _redirect_factories,
    _show_optimizers_cuda_types,
    multiply_with_onednn,
)


class CpuPlatform:
    """Gloo, float32 or bfloat16, a pure-PyTorch layer spec."""

    name = "cpu"
    device = "cpu"
    backend = "gloo"

    def activate(self, threads: int) -> None:
        """Install the replacements and set the number of torch threads. Raises ConfigError."""
        _check_environment()
        torch.set_num_threads(threads)
        # "Transformer Engine / Apex is not installed": so it is meant. And megatron uses older names of torch's.
        warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
        for caller in ("megatron", "torch.distributed"):
            warnings.filterwarnings("ignore", category=FutureWarning, module=caller)
        # Fills a cache of the factories: built after they are wrapped, `torch.device("meta")` as a
        # context (which transformers uses) would silently stop working.
        torch.utils._device._device_constructors()
        _answer_device_queries()
        _answer_random_state()
        _redirect_factories()
        _show_optimizers_cuda_types()
        _patch_megatron_random()
        _patch_megatron_experts()
        multiply_with_onednn()

    def configure(self, config: TrainerConfig) -> None:
        """Nothing stands below Megatron here."""

    def layer_replacements(self, config: Any) -> Mapping[LayerRole, type]:
        """None: RMSNorm and packed attention in plain PyTorch."""
        return {}

    def synchronize(self) -> None:
        """Operations of the CPU are done when they return."""

    def memory(self) -> MemoryUse:
        """Of this process; its peak is that of its whole life, which Linux does not reset."""
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        return MemoryUse(psutil.Process().memory_info().rss, peak_bytes, psutil.virtual_memory().total)

    def reset_peak_memory(self) -> None:
        """Linux does not."""

    def peak_flops(self, precision: str) -> float | None:
        """Not known: it depends on cores, clock and instruction set."""
        return None


def _check_environment() -> None:
    if "megatron.core" in sys.modules:
        raise ConfigError(
            "the cpu platform must be activated before megatron is imported, and it already is: "
            "megatron would keep calling CUDA. Activate the platform first thing in the process"
        )
    if torch.cuda.is_available():
        raise ConfigError(
            "trainer.platform is cpu, but torch sees a CUDA device, whose calls would be redirected to the "
            "CPU. Hide it with CUDA_VISIBLE_DEVICES=''"
        )
    require_megatron("cpu")
    check_private_names("trainer on CPU, torch")
