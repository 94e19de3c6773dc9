"""Megatron-core on Ascend NPUs, through MindSpeed.

    torch --> torch_npu --> mindspeed.megatron_adaptor --> megatron      in this order, or Megatron keeps calling CUDA

The adaptor sends `torch.cuda` calls to the NPU (`torch_npu.contrib.transfer_to_npu`) and replaces functions of
Megatron. It reads the program's command line for its arguments, which are not ours: it sees an empty one, and is told
how the ranks are cut by `repatch`, the call that its own users with a configuration file make.

Written from the public interfaces of torch_npu and MindSpeed, and tested with stand-ins for them: it has not run on
an NPU yet (docs/platforms.md).
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from async_grpo.config.trainer import TrainerConfig
from async_grpo.errors import ConfigError, DependencyError
from async_grpo.utils.requirements import (
    INSTALL_MINDSPEED,
    INSTALL_TORCH_NPU,
    MINDSPEED_BRANCH,
    SOURCE_CANN,
    installed,
    release,
)
from trainer.platform.base import (
    LayerRole,
    MemoryUse,
    local_rank,
    missing,
    require_megatron,
    require_own_device,
    set_defaults,
)
from trainer.platform.cuda import peak_flops

ENVIRONMENT = {
    # Micro-batches differ in length; without it the allocator's fixed blocks fragment until memory runs out.
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    # Operators are handed to the device by a second thread, which also prepares them (level 2).
    "TASK_QUEUE_ENABLE": "2",
    # Host threads stay on the cores next to their NPU.
    "CPU_AFFINITY_CONF": "1",
    # Seconds for all ranks to meet: loading a large checkpoint takes longer on one than on another. Default: 120.
    "HCCL_CONNECT_TIMEOUT": "1800",
    # Seconds that a collective may take: above that of the process group, whose error says who was waited for.
    "HCCL_EXEC_TIMEOUT": "7200",
    # Kernels start in the order in which they are launched, which MindSpeed relies on as Megatron does.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
"""Set only where the user's environment does not."""


class NpuPlatform:
    """HCCL between devices and gloo between processes."""

    name = "npu"
    device = "npu"
    backend = "cpu:gloo,npu:hccl"

    def __init__(self) -> None:
        self._peak_tflops: float | None = None

    def activate(self, threads: int) -> None:
        """Take the NPU of this rank and adapt Megatron, which must not be imported yet.

        Raises ConfigError if it is, or if no NPU is there; DependencyError if a package is missing or does not match.
        """
        _check_order()
        set_defaults(ENVIRONMENT)
        require_megatron(self.name)
        torch = _import("torch", INSTALL_TORCH_NPU)
        _import("torch_npu", INSTALL_TORCH_NPU)
        _check_pair()
        if not torch.npu.is_available():
            raise ConfigError(
                "trainer.platform is npu, but torch_npu sees no NPU. Check npu-smi info and ASCEND_RT_VISIBLE_DEVICES, "
                f"and that CANN's environment is set: {SOURCE_CANN}; or set trainer.platform to cpu"
            )
        rank = local_rank()
        require_own_device(self.name, rank, torch.npu.device_count(), "ASCEND_RT_VISIBLE_DEVICES")
        torch.npu.set_device(rank)
        torch.set_num_threads(threads)
        with _empty_command_line():
            _import("mindspeed.megatron_adaptor", INSTALL_MINDSPEED)

    def configure(self, config: TrainerConfig) -> None:
        """MindSpeed patches by its arguments: give it ours. Raises DependencyError if it has no `repatch`."""
        self._peak_tflops = config.device_peak_tflops
        adaptor = _import("mindspeed.megatron_adaptor", INSTALL_MINDSPEED)
        if not hasattr(adaptor, "repatch"):
            raise DependencyError(
                "the installed MindSpeed has no megatron_adaptor.repatch, so it cannot be told how the ranks are cut: "
                f"it is not of the branch {MINDSPEED_BRANCH}. Run: {INSTALL_MINDSPEED}"
            )
        with _empty_command_line():
            adaptor.repatch(mindspeed_arguments(config))

    def layer_replacements(self, config: Any) -> Mapping[LayerRole, type]:
        """The fused attention kernel, unless sequences are split over ranks: there our own attention gathers keys."""
        from trainer.platform.npu_attention import FusedAttention

        return {} if config.context_parallel_size > 1 else {LayerRole.attention: FusedAttention}

    def synchronize(self) -> None:
        """Of all streams."""
        import torch

        torch.npu.synchronize()

    def memory(self) -> MemoryUse:
        """As torch's allocator counts tensors; the context and HCCL's buffers are not in it."""
        import torch

        total_bytes = torch.npu.get_device_properties(torch.npu.current_device()).total_memory
        return MemoryUse(torch.npu.memory_allocated(), torch.npu.max_memory_allocated(), total_bytes)

    def reset_peak_memory(self) -> None:
        """Of torch's allocator."""
        import torch

        torch.npu.reset_peak_memory_stats()

    def peak_flops(self, precision: str) -> float | None:
        """`trainer.device_peak_tflops`, else what the vendor states for a device of this name."""
        import torch

        if self._peak_tflops is not None:
            return self._peak_tflops * 1e12
        return peak_flops(torch.npu.get_device_name(), precision)


def mindspeed_arguments(config: TrainerConfig) -> dict[str, Any]:
    """What MindSpeed's features look at, under Megatron's names (`get_mindspeed_args` has them afterwards)."""
    return {
        "tensor_model_parallel_size": config.tensor_parallel,
        "pipeline_model_parallel_size": config.pipeline_parallel,
        "context_parallel_size": config.context_parallel,
        "expert_model_parallel_size": config.expert_parallel,
        "sequence_parallel": config.sequence_parallel,
        # Keys and values are gathered by our own attention: MindSpeed's schemes for it stay out of the way.
        "context_parallel_algo": "megatron_cp_algo",
        "use_distributed_optimizer": True,
        "variable_seq_lengths": True,
    }


def _check_order() -> None:
    if "megatron.core" in sys.modules:
        raise ConfigError(
            "the npu platform must be activated before megatron is imported, and it already is: MindSpeed could not "
            "adapt it any more. Activate the platform first thing in the process"
        )


def _check_pair() -> None:
    """torch_npu is built for one release of torch."""
    torch_version, npu_version = installed("torch"), installed("torch-npu")
    if torch_version and npu_version and release(torch_version) != release(npu_version):
        raise DependencyError(
            f"torch-npu {npu_version} is built for torch {release(npu_version)}, but torch {torch_version} is "
            f"installed. Run: {INSTALL_TORCH_NPU}"
        )


def _import(module: str, fix: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing("npu", module, error, fix) from error


@contextlib.contextmanager
def _empty_command_line() -> Iterator[None]:
    """MindSpeed parses sys.argv when it is imported, and takes options that it does not know for Megatron's."""
    given, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    finally:
        sys.argv = given
