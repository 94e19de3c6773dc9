"""Megatron-core on CPU: the calls to torch.cuda that it makes are answered by the CPU.

Megatron-core has no CPU backend, but all its parallelism (tensor, pipeline, data, distributed optimizer) is torch and
torch.distributed. `CpuPlatform.activate` replaces the few CUDA entry points that it uses (`cpu_patches`). That depends
on internals of one version, so the version is checked exactly, and the replacement happens only in a process that asked
for it and before megatron is imported.
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
"""Freed memory is kept, in large pages. Otherwise the kernel would map and zero every activation again: a sixth of a
step's processor time, and more with long micro-batches. glibc reads it when a process starts; others ignore it."""


class CpuPlatform(Platform):
    """Gloo, float32 or bfloat16, our own layers in plain PyTorch."""

    name = "cpu"
    device = "cpu"
    backend = "gloo"

    def rank_environment(self, config: TrainerConfig) -> Mapping[str, str]:
        """Settings of the memory allocator."""
        return {"GLIBC_TUNABLES": KEEP_MEMORY}

    def probes(self) -> Sequence[Check]:
        """The installation for CPUs."""
        return (partial(present, "PyTorch", "torch", INSTALL_CPU), check_torchvision, *common_probes(INSTALL_CPU))

    def activate(self, config: TrainerConfig) -> None:
        """Install the replacements and set the number of torch threads.

        Raises ConfigError if megatron is imported already or has another version, or if torch sees a CUDA device.
        """
        import torch

        if torch.cuda.is_available():
            raise ConfigError(
                "trainer.platform is cpu, but torch sees a CUDA device, whose calls would be redirected to the CPU. "
                "Hide it with CUDA_VISIBLE_DEVICES=''"
            )
        require_megatron(self.name, unimported="megatron would keep calling CUDA")
        check_private_names("trainer on CPU, torch")
        torch.set_num_threads(config.threads)
        # "Transformer Engine / Apex is not installed" is intended; and megatron uses deprecated names of torch.
        warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
        for caller in ("megatron", "torch.distributed"):
            warnings.filterwarnings("ignore", category=FutureWarning, module=caller)
        from trainer.platform.cpu_patches import patch_for_cpu

        patch_for_cpu()

    def layer_replacements(self, config: Any) -> Mapping[LayerRole, type]:
        """Our own layers, and where ranks share sequences the attention that gathers their keys."""
        if config.context_parallel_size == 1:
            return {}
        from trainer.platform.fused_layers import PlainAttention

        self.attention = "scaled_dot_product_attention, over the keys of all ranks that share the sequences"
        return {LayerRole.attention: PlainAttention}

    def memory(self) -> MemoryUse:
        """Memory of this process; the peak is that of its whole life, which Linux does not reset."""
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        return MemoryUse(psutil.Process().memory_info().rss, peak_bytes, total_memory())


def check_torchvision() -> Finding:
    """Whether torchvision fits torch: a CUDA build beside a CPU build of torch breaks transformers."""
    version, torch_version = installed("torchvision"), installed("torch") or ""
    broken = bool(version) and "+cpu" in torch_version and "+cpu" not in (version or "") and version != STAND_IN
    found = f"{version or 'not installed'}{' (empty stand-in)' if version == STAND_IN else ''}"
    return Finding("torchvision", not broken, found, INSTALL_STAND_INS)
