"""Megatron-core on CPU: its calls to torch.cuda run on the CPU.

Megatron-core has no CPU backend, but all its parallelism (tensor, pipeline, data, distributed optimizer) is torch and
torch.distributed. `CpuPlatform.activate` patches the few CUDA entry points that it uses (`cpu_patches`). The patches
depend on internals of one version, so the version must match exactly, and they are installed only by `activate`, before
megatron is imported.
"""

from __future__ import annotations

import resource
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import psutil

from async_grpo.config.trainer import TrainerConfig
from async_grpo.errors import ConfigError
from async_grpo.utils.memory_limit import total_memory
from async_grpo.utils.private_names import check_private_names
from async_grpo.utils.requirements import INSTALL_CPU, INSTALL_STAND_INS, STAND_IN, Check, Finding, installed, present
from trainer.platform.base import LayerRole, MemoryUse, Platform, require_megatron
from trainer.platform.probes import common_probes

KEEP_MEMORY = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296:glibc.malloc.hugetlb=1"
"""Keep freed memory, in large pages. Otherwise the kernel maps and zeroes every activation again, which takes a sixth
of a step's processor time, and more with long micro-batches. glibc reads it when a process starts; other C libraries
ignore it."""


class CpuPlatform(Platform):
    """Gloo, float32 or bfloat16, our own layers in plain PyTorch."""

    name = "cpu"
    device = "cpu"
    backend = "gloo"

    def rank_environment(self, config: TrainerConfig) -> Mapping[str, str]:
        """Settings of the memory allocator."""
        return {"GLIBC_TUNABLES": KEEP_MEMORY}

    def probes(self) -> Sequence[Check]:
        """PyTorch, torchvision and the packages that all platforms need."""
        return (partial(present, "PyTorch", "torch", INSTALL_CPU), check_torchvision, *common_probes(INSTALL_CPU))

    def activate(self, config: TrainerConfig) -> None:
        """Install the patches and set the number of torch threads.

        Raises ConfigError if megatron is imported already or has another version, or if torch sees a CUDA device.
        """
        import torch

        # The patches redirect every call to torch.cuda, so a real GPU would silently not be used.
        if torch.cuda.is_available():
            raise ConfigError(
                "trainer.platform is cpu, but torch sees a CUDA device, whose calls would be redirected to the CPU. "
                "Hide it with CUDA_VISIBLE_DEVICES=''"
            )
        require_megatron(self.name, unimported="megatron would keep calling CUDA")
        check_private_names("trainer on CPU, torch")
        torch.set_num_threads(config.threads)

        # Megatron warns that Transformer Engine and Apex are not installed, which is intended here, and uses
        # deprecated names of torch.
        warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
        for caller in ("megatron", "torch.distributed"):
            warnings.filterwarnings("ignore", category=FutureWarning, module=caller)

        # Imports megatron, so only after the checks above.
        from trainer.platform.cpu_patches import patch_for_cpu

        patch_for_cpu()

    def layer_replacements(self, config: Any) -> Mapping[LayerRole, type]:
        """Nothing, or with context parallelism an attention that gathers the keys of all ranks."""
        if config.context_parallel_size == 1:
            return {}
        from trainer.platform.fused_layers import PlainAttention

        self.attention = "scaled_dot_product_attention, over the keys of all ranks that share the sequences"
        return {LayerRole.attention: PlainAttention}

    def memory_use(self) -> MemoryUse:
        """Memory of this process. The peak is that of its whole life, because Linux does not reset it."""
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return MemoryUse(
            used_bytes=psutil.Process().memory_info().rss,
            peak_bytes=peak_kib << 10,
            total_bytes=total_memory(),
        )


def check_torchvision() -> Finding:
    """Check that torchvision fits torch: a CUDA build with a CPU build of torch breaks transformers."""
    version = installed("torchvision")
    if version is None:
        return Finding("torchvision", True, "not installed", INSTALL_STAND_INS)
    if version == STAND_IN:
        return Finding("torchvision", True, f"{version} (empty stand-in)", INSTALL_STAND_INS)

    is_cpu_torch = "+cpu" in (installed("torch") or "")
    return Finding("torchvision", "+cpu" in version or not is_cpu_torch, version, INSTALL_STAND_INS)
