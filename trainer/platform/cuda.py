"""Megatron-core on NVIDIA GPUs: nothing is patched; layers of Transformer Engine are used where it is installed.

    nvidia-smi --query-gpu=...   one line per GPU

    attention of packed sequences          needs (in bfloat16)
    Transformer Engine's                   capability 9.0 to 11: its kernel for them; elsewhere it computes all T x T
                                           scores, unless it finds a flash-attn that it knows
    torch's varlen_attn                    capability 8.0; the only one where ranks share sequences
    our own (trainer/model/layers.py)      nothing: also in float32

Transformer Engine replaces norms, linear layers and rotary embeddings always. Norms stay modules of their own, beside
the linear layers: fused, their parameters would have other names. torch has fused norms of its own.

Experts are torch's grouped matrix products from capability 9.0 on, in bfloat16, with torch 2.10 or newer
(trainer/platform/grouped_experts.py), and Megatron's SequentialMLP elsewhere.

Peak FLOP/s are those of the vendors' data sheets, dense, by device name and precision. float32 is that of ordinary
units, because TensorFloat-32 is off here.

docs/platforms.md says what of this was tested without a GPU.
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
from trainer.platform.base import Device, LayerRole, Platform, Run, import_package, run_tool
from trainer.platform.probes import check_torch_sees

ENVIRONMENT: Mapping[str, str] = {
    # Micro-batches differ in length; without it the allocator's fixed blocks fragment until memory runs out.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
"""Set only where the user's environment does not."""

TENSOR_PARALLEL_ENVIRONMENT: Mapping[str, str] = {
    # Kernels start in the order in which they are launched. Megatron overlaps the communication of tensor-parallel
    # ranks by relying on it, and nothing else of Megatron asks for it (megatron/core/tensor_parallel/layers.py). With
    # one queue for all streams, copies of new weights to the host hold up the kernels of the next step behind them.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
"""The same, with `tensor_parallel` above 1 alone."""

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
"""By a word of the name that torch reports, such as `NVIDIA H100 80GB HBM3`."""

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
        """One hardware queue for all streams only where ranks are tensor-parallel."""
        return {**ENVIRONMENT, **(TENSOR_PARALLEL_ENVIRONMENT if config.tensor_parallel > 1 else {})}

    def devices(self, run: Run = run_tool) -> list[Device]:
        """The GPUs that nvidia-smi lists."""
        return _parse_smi(run([self.tool, *_QUERY]) or "")

    def package_probes(self) -> Sequence[Check]:
        """PyTorch in a build for CUDA, and Transformer Engine."""
        return (
            check_torch,
            partial(check_torch_sees, "cuda", "torch", "NCCL", _TORCH_FIX),
            partial(
                optional, "Transformer Engine", "transformer-engine", INSTALL_TRANSFORMER_ENGINE, TRANSFORMER_ENGINE
            ),
        )

    def model_options(self, *, experts: bool) -> Mapping[str, Any]:
        """Transformer Engine's rotary embeddings, and SwiGLU by torch.compile where it can compile. Experts get few
        tokens and each time another number of them, for which it would compile again."""
        return {"apply_rope_fusion": _has_transformer_engine(), "bias_activation_fusion": not experts and can_compile()}

    def layer_replacements(self, config: Any) -> Mapping[LayerRole, type]:
        """Transformer Engine's layers where it is installed, and the fastest attention that this device has."""
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
        """True if torch has one kernel for all experts on this device. Elsewhere `grouped_mm` is a loop as well, and
        waits for the device besides."""
        import torch

        from trainer.platform.grouped_experts import has_grouped_product, is_aligned

        capable = self._torch().get_device_capability() >= (9, 0)
        return has_grouped_product() and capable and config.params_dtype == torch.bfloat16 and is_aligned(config)

    def _choose_attention(self, config: Any) -> tuple[type | None, str]:
        """The class, None for our own, and what it is and why."""
        import torch

        from trainer.platform.fused_layers import VarlenAttention, has_varlen_attention

        if config.context_parallel_size > 1:
            self._check_shared_sequences(config)
            return VarlenAttention, "torch's varlen_attn, over the keys of all ranks that share the sequences"
        if config.params_dtype != torch.bfloat16:
            return None, f"{Platform.attention}: fused kernels compute in bfloat16"
        major, minor = capability = self._torch().get_device_capability()
        engine, device = _has_transformer_engine(), f"capability {major}.{minor}"
        if engine and (9, 0) <= capability < (12, 0):
            from megatron.core.extensions import transformer_engine as extension

            return extension.TEDotProductAttention, f"Transformer Engine's: it has a kernel for {device}"
        if capability >= (8, 0) and has_varlen_attention():
            lacks = f"has no kernel of its own for {device}" if engine else "is not installed"
            return VarlenAttention, f"torch's varlen_attn: Transformer Engine {lacks}"
        return None, f"{Platform.attention}: torch {torch.__version__} has no varlen_attn for {device}"

    def _check_shared_sequences(self, config: Any) -> None:
        """Raise ConfigError if ranks that share sequences have no attention on this device.

        Without `varlen_attn` a mask would be needed, with which torch keeps all scores: at 32k tokens and 7 heads of a
        rank 15 GB a layer.
        """
        import torch

        from trainer.platform.fused_layers import has_varlen_attention

        major, minor = self._torch().get_device_capability()
        if config.params_dtype != torch.bfloat16:
            missing = "computes in bfloat16, and model.precision is float32. Set model.precision to bfloat16"
        elif (major, minor) < (8, 0):
            missing = f"needs compute capability 8.0, and this device has {major}.{minor}. Use another device"
        elif not has_varlen_attention():
            missing = f"takes no fewer key heads than query heads in torch {torch.__version__}. Install torch 2.13"
        else:
            return
        raise ConfigError(
            f"trainer.context_parallel is {config.context_parallel_size}, whose attention on CUDA is torch's "
            f"varlen_attn. It {missing}, or set trainer.context_parallel to 1"
        )

    def stated_tflops(self, precision: str) -> float | None:
        """The figure for the name that torch reports of this rank's device."""
        return peak_tflops(self._torch().get_device_name(), precision)


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Dense TFLOP/s of one device by the vendor's data sheet; None for a device that is not listed.

    >>> peak_tflops("NVIDIA A100-SXM4-80GB", "bfloat16")
    312
    """
    words = device_name.replace("-", " ").split()
    for name in sorted(PEAK_TFLOPS, key=len, reverse=True):  # the longer name is the more exact one
        if all(part in words for part in name.split()):
            return PEAK_TFLOPS[name].get(precision)
    return None


def _has_transformer_engine() -> bool:
    """Whether Transformer Engine is installed. Raises DependencyError if it is, but does not load."""
    if importlib.util.find_spec("transformer_engine") is None:
        return False
    import_package("cuda", "transformer_engine.pytorch", INSTALL_TRANSFORMER_ENGINE)
    return True


def can_compile() -> bool:
    """Whether torch.compile finds what it needs for a GPU: Triton, a C compiler and the headers of Python."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    compiler = any(shutil.which(name) for name in (os.environ.get("CC", "gcc"), "clang"))
    return importlib.util.find_spec("triton") is not None and compiler and headers.exists()


def transformer_engine_layers() -> dict[LayerRole, type]:
    """Transformer Engine's classes for norms and linear layers, in Megatron's wrappers."""
    from megatron.core.extensions import transformer_engine as extension

    return {
        LayerRole.norm: extension.TENorm,
        LayerRole.column_linear: extension.TEColumnParallelLinear,
        LayerRole.row_linear: extension.TERowParallelLinear,
    }


def check_torch() -> Finding:
    """Whether torch is a build for CUDA: one with `+cpu` in its version is not."""
    version = installed("torch")
    fix = "pip install --force-reinstall torch (from PyPI: its builds are for CUDA)" if version else INSTALL_CUDA
    return Finding("PyTorch", version is not None and "+cpu" not in version, version or "not installed", fix)


def _parse_smi(text: str) -> list[Device]:
    """
    >>> _parse_smi("0, NVIDIA H100 80GB HBM3, 81559, 550.54.15")[0].name
    'NVIDIA H100 80GB HBM3'
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [
        Device(int(index), name, float(memory) / 1024, driver)
        for index, name, memory, driver in (row for row in rows if len(row) == 4)
        if index.isdigit() and memory.replace(".", "").isdigit()
    ]
