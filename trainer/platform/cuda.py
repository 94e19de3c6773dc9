"""Megatron-core on NVIDIA GPUs. Nothing is patched; layers of Transformer Engine are used if it is installed.

    nvidia-smi --query-gpu=...   one line per GPU

    attention of packed sequences          needs (in bfloat16)
    Transformer Engine's                   capability 9.0 to 11, where it has a kernel for packed sequences; on other
                                           devices it computes all T x T scores, unless a supported flash-attn is
                                           installed
    torch's varlen_attn                    capability 8.0; the only choice with context parallelism
    our own (trainer/model/layers.py)      nothing; also works in float32

Norms, linear layers and rotary embeddings are Transformer Engine's whenever it is installed. Norms stay separate
modules: fused into the linear layers, their parameters would have other names, and torch has fused norms anyway.

Experts are torch's grouped matrix products from capability 9.0 on, in bfloat16, with torch 2.10 or newer
(trainer/platform/grouped_experts.py), and Megatron's SequentialMLP otherwise.

Peak FLOP/s are from the vendor's data sheets, dense, by device name and precision. The float32 values are those of the
CUDA cores, because TensorFloat-32 is off here.

docs/platforms.md lists what was tested without a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from async_grpo.config.trainer import TrainerConfig
from async_grpo.errors import ConfigError
from async_grpo.utils.requirements import (
    INSTALL_CUDA,
    INSTALL_TRANSFORMER_ENGINE,
    TRANSFORMER_ENGINE,
    Check,
    Finding,
    installed,
    optional,
)
from trainer.platform.accelerator import Accelerator
from trainer.platform.base import Device, LayerRole, Platform, RunTool, import_package, run_tool
from trainer.platform.probes import check_torch_sees

ENVIRONMENT: Mapping[str, str] = {
    # Micro-batches differ in length. With fixed blocks the allocator fragments until memory runs out.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
"""Variables of every rank, unless the user's environment sets them."""

TENSOR_PARALLEL_ENVIRONMENT: Mapping[str, str] = {
    # Start kernels in the order in which they are launched. Megatron needs this to overlap the communication of
    # tensor-parallel ranks, and for nothing else (megatron/core/tensor_parallel/layers.py). It puts all streams in one
    # queue, so copies of new weights to the host delay the kernels of the next step: do not set it without need.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
"""Additional variables with `tensor_parallel` above 1, unless the user's environment sets them."""

PEAK_TFLOPS: Mapping[str, Mapping[str, float]] = {
    "B200": {"bfloat16": 2250, "float32": 75},
    "GH200": {"bfloat16": 989, "float32": 67},
    "H200": {"bfloat16": 989, "float32": 67},
    "H100 PCIe": {"bfloat16": 756, "float32": 51},
    "H100 NVL": {"bfloat16": 835, "float32": 60},
    "H100": {"bfloat16": 989, "float32": 67},
    "H800": {"bfloat16": 989, "float32": 67},
    "H20": {"bfloat16": 148, "float32": 44},
    "A100": {"bfloat16": 312, "float32": 19.5},
    "A800": {"bfloat16": 312, "float32": 19.5},
    "L40S": {"bfloat16": 362, "float32": 91.6},
    "A10G": {"bfloat16": 70, "float32": 35},
    "A10": {"bfloat16": 125, "float32": 31.2},
    "L4": {"bfloat16": 121, "float32": 30.3},
    "RTX 4090": {"bfloat16": 165, "float32": 82.6},
    "RTX 3090": {"bfloat16": 71, "float32": 35.6},
}
"""Dense TFLOP/s by words of the name that torch reports, such as `NVIDIA H100 80GB HBM3`."""

_QUERY = ("--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader,nounits")
_TORCH_FIX = "python -c 'import torch; torch.cuda.init()' says why; check the driver against torch's CUDA version"


class CudaPlatform(Accelerator):
    """NCCL between devices and gloo between processes."""

    name = "cuda"
    device = "cuda"
    backend = "cpu:gloo,cuda:nccl"
    visible_variable = "CUDA_VISIBLE_DEVICES"
    network_variables = ("NCCL_SOCKET_IFNAME",)
    tool = "nvidia-smi"
    device_files = ("nvidia[0-9]*", "dxg", "nvgpu", "nvhost-gpu")  # the last three: WSL, and boards of the Jetson kind
    packages = MappingProxyType({"torch": INSTALL_CUDA})
    driver_fix = "install the NVIDIA driver; in a container: docker run --gpus all"
    device_fix = (
        "Check nvidia-smi and CUDA_VISIBLE_DEVICES, and that torch is a CUDA build (async-grpo doctor --platform cuda)"
    )

    def rank_environment(self, config: TrainerConfig) -> Mapping[str, str]:
        """Return the variables, with one hardware queue for all streams only if ranks are tensor-parallel."""
        if config.tensor_parallel > 1:
            return {**ENVIRONMENT, **TENSOR_PARALLEL_ENVIRONMENT}
        return ENVIRONMENT

    def list_devices(self, run: RunTool = run_tool) -> list[Device]:
        """Return the GPUs that nvidia-smi lists."""
        return _parse_smi(run([self.tool, *_QUERY]) or "")

    def package_probes(self) -> Sequence[Check]:
        """Check for a CUDA build of PyTorch, and for Transformer Engine."""
        return (
            check_torch,
            partial(check_torch_sees, "cuda", "torch", "NCCL", _TORCH_FIX),
            partial(
                optional, "Transformer Engine", "transformer-engine", INSTALL_TRANSFORMER_ENGINE, TRANSFORMER_ENGINE
            ),
        )

    def model_options(self, *, experts: bool) -> Mapping[str, Any]:
        """Enable Transformer Engine's rotary embeddings and a compiled SwiGLU.

        SwiGLU of experts is not compiled: an expert gets another number of tokens each time, so torch.compile would
        compile again and again.
        """
        return {
            "apply_rope_fusion": _has_transformer_engine(),
            "bias_activation_fusion": not experts and can_compile(),
        }

    def layer_replacements(self, config: Any) -> Mapping[LayerRole, type]:
        """Return Transformer Engine's layers if it is installed, and the fastest attention for this device."""
        layers = transformer_engine_layers() if _has_transformer_engine() else {}

        attention, self.attention = self._choose_attention(config)
        if attention is not None:
            layers[LayerRole.attention] = attention

        if config.num_moe_experts and self._has_grouped_experts(config):
            from trainer.platform.grouped_experts import GroupedExperts

            self.experts = "torch's grouped_mm"
            layers[LayerRole.experts] = GroupedExperts
        return layers

    def _has_grouped_experts(self, config: Any) -> bool:
        """True if torch has one kernel for all experts on this device.

        Otherwise `grouped_mm` loops over the experts, as SequentialMLP does, and in addition waits for the device.
        """
        import torch

        from trainer.platform.grouped_experts import has_grouped_product, is_aligned

        has_kernel = has_grouped_product() and self._torch_device().get_device_capability() >= (9, 0)
        return has_kernel and config.params_dtype == torch.bfloat16 and is_aligned(config)

    def _choose_attention(self, config: Any) -> tuple[type | None, str]:
        """Return the class, None for our own, and a description with the reason."""
        import torch

        from trainer.platform.fused_layers import VarlenAttention, has_varlen_attention

        if config.context_parallel_size > 1:
            self._check_shared_sequences(config)
            return VarlenAttention, "torch's varlen_attn, over the keys of all ranks that share the sequences"
        if config.params_dtype != torch.bfloat16:
            return None, f"{Platform.attention}: fused kernels compute in bfloat16"
        capability = self._torch_device().get_device_capability()
        major, minor = capability
        device = f"capability {major}.{minor}"
        has_engine = _has_transformer_engine()
        if has_engine and (9, 0) <= capability < (12, 0):
            from megatron.core.extensions import transformer_engine as extension

            return extension.TEDotProductAttention, f"Transformer Engine's: it has a kernel for {device}"
        if capability >= (8, 0) and has_varlen_attention():
            reason = f"has no kernel of its own for {device}" if has_engine else "is not installed"
            return VarlenAttention, f"torch's varlen_attn: Transformer Engine {reason}"
        return None, f"{Platform.attention}: torch {torch.__version__} has no varlen_attn for {device}"

    def _check_shared_sequences(self, config: Any) -> None:
        """Raise ConfigError if this device has no attention for ranks that share sequences.

        Without `varlen_attn` we would need a mask, with which torch keeps all scores: with 32k tokens and 7 heads per
        rank 15 GB per layer.
        """
        import torch

        from trainer.platform.fused_layers import has_varlen_attention

        major, minor = self._torch_device().get_device_capability()
        if config.params_dtype != torch.bfloat16:
            problem = "computes in bfloat16, and model.precision is float32. Set model.precision to bfloat16"
        elif (major, minor) < (8, 0):
            problem = f"needs compute capability 8.0, and this device has {major}.{minor}. Use another device"
        elif not has_varlen_attention():
            problem = f"takes no fewer key heads than query heads in torch {torch.__version__}. Install torch 2.13"
        else:
            return
        raise ConfigError(
            f"trainer.context_parallel is {config.context_parallel_size}, whose attention on CUDA is torch's "
            f"varlen_attn. It {problem}, or set trainer.context_parallel to 1"
        )

    def stated_tflops(self, precision: str) -> float | None:
        """Dense TFLOP/s listed for the name of this rank's device."""
        return peak_tflops(self._torch_device().get_device_name(), precision)


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Dense TFLOP/s of one device in the vendor's data sheet; None if the device is not listed.

    >>> peak_tflops("NVIDIA A100-SXM4-80GB", "bfloat16")
    312
    """
    words = device_name.replace("-", " ").split()
    # Longest name first: an `H100 PCIe` also matches `H100`, whose value is wrong for it.
    for name in sorted(PEAK_TFLOPS, key=len, reverse=True):
        if all(part in words for part in name.split()):
            return PEAK_TFLOPS[name].get(precision)
    return None


def _has_transformer_engine() -> bool:
    """True if Transformer Engine is installed. Raises DependencyError if it is installed but does not load."""
    if importlib.util.find_spec("transformer_engine") is None:
        return False
    import_package("cuda", "transformer_engine.pytorch", INSTALL_TRANSFORMER_ENGINE)
    return True


def can_compile() -> bool:
    """True if torch.compile has what it needs for a GPU: Triton, a C compiler and Python's headers."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    has_compiler = any(shutil.which(name) for name in (os.environ.get("CC", "gcc"), "clang"))
    return importlib.util.find_spec("triton") is not None and has_compiler and headers.exists()


def transformer_engine_layers() -> dict[LayerRole, type]:
    """Return Megatron's wrappers of Transformer Engine's norms and linear layers."""
    from megatron.core.extensions import transformer_engine as extension

    return {
        LayerRole.norm: extension.TENorm,
        LayerRole.column_linear: extension.TEColumnParallelLinear,
        LayerRole.row_linear: extension.TERowParallelLinear,
    }


def check_torch() -> Finding:
    """Check that torch is a build for CUDA. Builds for CPUs have `+cpu` in their version."""
    version = installed("torch")
    if version is None:
        return Finding("PyTorch", False, "not installed", INSTALL_CUDA)
    fix = "pip install --force-reinstall torch (from PyPI: its builds are for CUDA)"
    return Finding("PyTorch", "+cpu" not in version, version, fix)


def _parse_smi(text: str) -> list[Device]:
    """Return one device per line of nvidia-smi's table. Lines of another form, such as errors, are skipped.

    >>> _parse_smi("0, NVIDIA H100 80GB HBM3, 81559, 550.54.15")[0].name
    'NVIDIA H100 80GB HBM3'
    """
    devices = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 4:
            continue
        index, name, memory_mib, driver = cells
        if index.isdigit() and memory_mib.replace(".", "").isdigit():
            devices.append(Device(int(index), name, float(memory_mib) / 1024, driver))
    return devices
