"""Megatron-core on NVIDIA GPUs: nothing is replaced; layers of Transformer Engine where it is installed.

This half has not run on a GPU yet: see docs/platforms.md for what was tested without one.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from async_grpo.config.trainer import TrainerConfig
from async_grpo.errors import ConfigError
from async_grpo.planner.devices import peak_flops
from async_grpo.versions import INSTALL_CUDA
from trainer.platform.base import MemoryUse, local_rank, missing, require_megatron, require_own_device, set_defaults

ENVIRONMENT = {
    # Kernels start in the order in which they are launched: Megatron overlaps communication by relying on it.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # Micro-batches differ in length; without it the allocator's fixed blocks fragment until memory runs out.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
"""Set only where the user's environment does not."""


class CudaPlatform:
    """NCCL between devices and gloo between processes."""

    name = "cuda"
    device = "cuda"
    backend = "cpu:gloo,cuda:nccl"

    def __init__(self) -> None:
        self._peak_tflops: float | None = None

    def activate(self, threads: int) -> None:
        """Take the GPU of this rank. Raises ConfigError without one, DependencyError without torch."""
        set_defaults(ENVIRONMENT)
        require_megatron(self.name)
        try:
            import torch
        except ImportError as error:
            raise missing(self.name, "torch", error, INSTALL_CUDA) from error
        if not torch.cuda.is_available():
            raise ConfigError(
                f"trainer.platform is cuda, but torch {torch.__version__} sees no CUDA device. Check nvidia-smi and "
                "CUDA_VISIBLE_DEVICES, and that torch is a CUDA build (async-grpo doctor --platform cuda); "
                "or set trainer.platform to cpu"
            )
        rank = local_rank()
        require_own_device(self.name, rank, torch.cuda.device_count(), "CUDA_VISIBLE_DEVICES")
        torch.cuda.set_device(rank)
        torch.set_num_threads(threads)

    def configure(self, config: TrainerConfig) -> None:
        """Megatron itself knows this device."""
        self._peak_tflops = config.device_peak_tflops

    def layer_spec(self, config: Any) -> Any:
        """Our own layers, with Transformer Engine's in their places where it is installed."""
        from trainer.model.spec import block_spec

        spec = block_spec(config)
        if importlib.util.find_spec("transformer_engine") is None:
            return spec
        from trainer.platform.transformer_engine import with_transformer_engine

        return with_transformer_engine(spec, config)

    def synchronize(self) -> None:
        """Of all streams."""
        import torch

        torch.cuda.synchronize()

    def memory(self) -> MemoryUse:
        """As torch's allocator counts tensors; the context and NCCL's buffers are not in it."""
        import torch

        total_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return MemoryUse(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), total_bytes)

    def reset_peak_memory(self) -> None:
        """Of torch's allocator."""
        import torch

        torch.cuda.reset_peak_memory_stats()

    def peak_flops(self, precision: str) -> float | None:
        """`trainer.device_peak_tflops`, else what the vendor states for a device of this name."""
        import torch

        if self._peak_tflops is not None:
            return self._peak_tflops * 1e12
        return peak_flops(torch.cuda.get_device_name(), precision)
