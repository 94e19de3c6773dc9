"""Arguments and environment of vLLM on a CPU, on CUDA and on Ascend. No other part of the engine asks for the device.

The Ascend half follows the documentation and the source of vllm-ascend 0.23; this project has not run it.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.config.rollout import EngineLimits, Quantization, VllmConfig
from async_grpo.errors import EngineError
from async_grpo.utils.network import LOOPBACK, card_environment
from async_grpo.utils.requirements import (
    INSTALL_ASCEND,
    INSTALL_CPU,
    INSTALL_CUDA,
    VLLM_ASCEND,
    Check,
    Finding,
    installed,
    release,
)

LOAD_FORMAT = "async_grpo_"
"""Beginning of the names of vLLM's loaders that quantise; `register_loaders` makes them known."""
ROUTERS = r"\.(gate|shared_expert_gate)"
"""Modules, as a regular expression, that choose experts."""
_FORMATS = {"int8": ("int", "int-quantized"), "fp8": ("float", "float-quantized")}
_IN_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def check_platform(config: VllmConfig, device: str) -> None:
    """Raises EngineError if the installed vLLM computes on something else than `rollout.vllm.platform`."""
    build = BUILDS[config.platform]
    if device != build.device:
        raise EngineError(
            f"rollout.vllm.platform is {config.platform}, but the installed vLLM computes on {device or 'nothing'}. "
            f"Run: {build.install}. Or set rollout.vllm.platform"
        )


def check_limits(limits: EngineLimits, scheduler: Any) -> None:
    """Raises EngineError unless vLLM's scheduler has exactly the limits that the memory plan assumes."""
    wanted = {"max_num_seqs": limits.requests, "max_num_batched_tokens": limits.batched_tokens}
    found = {name: getattr(scheduler, name) for name in wanted}
    if found != wanted:
        raise EngineError(
            f"vLLM runs with {found}, but the memory plan is made for {wanted}: requests would queue, or memory run "
            "out. Set both in rollout.vllm.extra to what this vLLM accepts"
        )


def limit_arguments(limits: EngineLimits, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for AsyncEngineArgs with which the engine runs as the memory plan assumes, and decodes batches of every
    size in captured graphs; vLLM by itself stops at 512. `extra` may say otherwise for the graphs."""
    arguments = {"max_num_seqs": limits.requests, "max_num_batched_tokens": limits.batched_tokens}
    if limits.captures_graphs and not extra.keys() & {"compilation_config", "cudagraph_capture_sizes"}:
        arguments["max_cudagraph_capture_size"] = limits.requests
    return arguments


def quantization_arguments(kind: Quantization) -> dict[str, Any]:
    """Arguments of vLLM's engine: the scheme, as a checkpoint of it would have it, and the loader that makes one."""
    if kind == "none":
        return {}
    number, stored = _FORMATS[kind]
    args = {"num_bits": 8, "type": number, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**args, "strategy": "channel", "dynamic": False},
        "input_activations": {**args, "strategy": "token", "dynamic": True},
    }
    scheme = {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", f"re:.*{ROUTERS}$"],
    }
    return {
        "quantization": "compressed-tensors",
        "hf_overrides": {"quantization_config": scheme},
        "load_format": f"{LOAD_FORMAT}{kind}",
    }


def platform_arguments(config: VllmConfig, *, sleep_mode: bool = False) -> dict[str, Any]:
    """Arguments for AsyncEngineArgs that depend on platform and quantization.

    sleep_mode: the engine must be able to free its memory. A CPU engine has no such mode and only pauses.
    """
    arguments = quantization_arguments(config.quantization)
    if config.platform == "cpu":
        # A prompt read in pieces makes vLLM 0.32 rewind the request's random generator, which a CPU generator
        # cannot do ("CPU Generator does not use offset"), and the engine dies: so prompts are read whole.
        arguments |= {"kv_cache_memory_bytes": config.cache_bytes, "enable_chunked_prefill": False}
        if config.tensor_parallel == 1:
            # vLLM puts even a single worker of a CPU into a process of its own, because that is how it binds OpenMP to
            # cores, and polls for its answers, which takes a third of a core. Nothing is bound here. By its name, since
            # "uni" is overruled.
            arguments["distributed_executor_backend"] = _IN_ONE_PROCESS
        return arguments
    arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    if config.cache_bytes is not None:
        # vLLM then measures nothing. It would count what the trainer on the same device takes while it starts as its
        # own, and end with an error if the trainer gave something back.
        arguments["kv_cache_memory_bytes"] = config.cache_bytes
    if sleep_mode:
        if "expandable_segments:True" in os.environ.get("PYTORCH_NPU_ALLOC_CONF", ""):
            raise EngineError(
                "launch.share_devices is sleep, but PYTORCH_NPU_ALLOC_CONF has expandable_segments:True, from which "
                "vllm-ascend cannot free memory. Unset it (the trainer sets it for its own processes)"
            )
        arguments["enable_sleep_mode"] = True
    if config.platform == "ascend" and config.additional_config:
        arguments["additional_config"] = config.additional_config
    return arguments


def environment(config: VllmConfig) -> dict[str, str]:
    """The environment variables of vLLM. `nobind`: vLLM would otherwise bind every engine of the machine to the same
    first cores."""
    values = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(config.multiprocessing)),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if config.platform == "cpu":
        values |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(config.threads)}
        # vLLM sets these for its engine process, which may be forked from one that has already imported torch.
        values |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1"}
        # vLLM's sampler has torch compile a small function at the first token, even in an eager engine. That takes 2 s
        # at each start and saves nothing after it; and without a compiler, as in a lean container, the engine dies.
        values |= {"TORCHDYNAMO_DISABLE": "1"} if config.is_eager or not _can_compile() else {}
    if config.platform == "ascend":
        # Weights in the NZ layout cannot be replaced. torch_npu captures no graph at TASK_QUEUE_ENABLE=2.
        values |= {"VLLM_ASCEND_ENABLE_NZ": "0", "TASK_QUEUE_ENABLE": "1"}
    # An engine is on one machine: its workers find each other on the loopback, not where the machine's name leads.
    values |= {"VLLM_HOST_IP": LOOPBACK} | card_environment(LOOPBACK, BUILDS[config.platform].network_variables)
    return values | config.environment


def set_environment(config: VllmConfig) -> None:
    """Set the variables of `environment` that the user has not set. Call it before vllm is imported."""
    for name, value in environment(config).items():
        os.environ.setdefault(name, value)


def _can_compile() -> bool:
    """Whether torch finds a C++ compiler, and Python's headers for what it compiles."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return shutil.which(os.environ.get("CXX", "g++")) is not None and headers.exists()


def installation_checks(platform: str) -> Sequence[Check]:
    """Checks of the installed vLLM for `async-grpo doctor`; `platform` is one of the trainer's."""
    checks = tuple(build.check for build in BUILDS.values() if build.device == platform)
    fix = f"set rollout.vllm.platform to {' or '.join(BUILDS)}, on this machine or another"
    return checks or (lambda: Finding("vLLM", False, f"no engine is written for {platform}", fix),)


def check_vllm_cpu() -> Finding:
    """Whether vLLM is there, in its build for CPUs alone."""
    return _one_vllm("vllm-cpu", INSTALL_CPU)


def check_vllm_cuda() -> Finding:
    """Whether vLLM is there, in its build for GPUs alone."""
    return _one_vllm("vllm", INSTALL_CUDA)


def check_vllm_ascend() -> Finding:
    """Whether the plug-in and the vLLM that it is for are there."""
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


@dataclass(frozen=True, slots=True)
class VllmBuild:
    """The vLLM of one platform."""

    device: str
    """vLLM's name of the device, which is also the name of the trainer's platform."""
    install: str
    """The command that installs it."""
    check: Check
    network_variables: tuple[str, ...] = ()
    """Environment variables that name the network card of its collectives, beside gloo's."""


BUILDS = {
    "cpu": VllmBuild("cpu", INSTALL_CPU, check_vllm_cpu),
    "cuda": VllmBuild("cuda", INSTALL_CUDA, check_vllm_cuda, ("NCCL_SOCKET_IFNAME",)),
    "ascend": VllmBuild("npu", INSTALL_ASCEND, check_vllm_ascend, ("HCCL_SOCKET_IFNAME",)),
}
"""By `rollout.vllm.platform`."""
