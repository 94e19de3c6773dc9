"""Arguments and environment of vLLM on CPU, CUDA and Ascend. No other part of the engine depends on the device.

The Ascend half follows the documentation and source of vllm-ascend 0.23. It has not been run by this project.
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

LOAD_FORMAT_PREFIX = "async_grpo_"
"""Prefix of the `load_format` of our quantising loaders; `quantization.register_loaders` registers them."""
ROUTERS = r"\.(gate|shared_expert_gate)"
"""Regular expression of the modules that choose experts."""
_FORMATS = {"int8": ("int", "int-quantized"), "fp8": ("float", "float-quantized")}
_IN_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def check_platform(config: VllmConfig, device: str) -> None:
    """Raise EngineError if the installed vLLM runs on another device than `rollout.vllm.platform`.

    device: name of the device in vLLM.
    """
    build = BUILDS[config.platform]
    if device != build.device:
        raise EngineError(
            f"rollout.vllm.platform is {config.platform}, but the installed vLLM runs on {device or 'no device'}. "
            f"Run: {build.install}. Or change rollout.vllm.platform"
        )


def check_limits(limits: EngineLimits, scheduler: Any) -> None:
    """Raise EngineError unless vLLM's scheduler has exactly the limits that the memory plan assumes."""
    expected = {"max_num_seqs": limits.requests, "max_num_batched_tokens": limits.batched_tokens}
    actual = {name: getattr(scheduler, name) for name in expected}
    if actual != expected:
        raise EngineError(
            f"vLLM runs with {actual}, but the memory plan assumes {expected}: requests would queue, or memory would "
            "run out. Set both in rollout.vllm.extra to values that this vLLM accepts"
        )


def limit_arguments(limits: EngineLimits, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for AsyncEngineArgs: the limits of the memory plan, and captured graphs for batches of every size.

    vLLM's own default stops capturing at 512 requests. `extra` (rollout.vllm.extra) may choose other graphs.
    """
    arguments = {"max_num_seqs": limits.requests, "max_num_batched_tokens": limits.batched_tokens}
    if limits.captures_graphs and not extra.keys() & {"compilation_config", "cudagraph_capture_sizes"}:
        arguments["max_cudagraph_capture_size"] = limits.requests
    return arguments


def quantization_arguments(kind: Quantization) -> dict[str, Any]:
    """Arguments for AsyncEngineArgs: the scheme as a quantised checkpoint would declare it, and our loader."""
    if kind == "none":
        return {}
    number_type, storage_format = _FORMATS[kind]
    numbers = {"num_bits": 8, "type": number_type, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": numbers | {"strategy": "channel", "dynamic": False},
        "input_activations": numbers | {"strategy": "token", "dynamic": True},
    }
    scheme = {
        "quant_method": "compressed-tensors",
        "format": storage_format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", f"re:.*{ROUTERS}$"],
    }
    return {
        "quantization": "compressed-tensors",
        "hf_overrides": {"quantization_config": scheme},
        "load_format": f"{LOAD_FORMAT_PREFIX}{kind}",
    }


def platform_arguments(config: VllmConfig, *, sleep_mode: bool = False, fp32_head: bool = False) -> dict[str, Any]:
    """Arguments for AsyncEngineArgs that depend on platform and number formats.

    sleep_mode: the engine must be able to free its memory. A CPU engine has no such mode and only pauses. fp32_head:
    compute logits in float32.
    """
    arguments = quantization_arguments(config.quantization)
    if fp32_head:
        arguments["hf_overrides"] = arguments.get("hf_overrides", {}) | {"head_dtype": "float32"}
    if config.platform == "cpu":
        # With chunked prefill vLLM 0.32 rewinds the request's random generator. A CPU generator cannot do that ("CPU
        # Generator does not use offset"), and the engine dies. So prompts are read in one piece.
        arguments |= {"kv_cache_memory_bytes": config.cache_bytes, "enable_chunked_prefill": False}
        if config.tensor_parallel == 1:
            # On CPU, vLLM runs even a single worker in a separate process, to bind OpenMP to cores, and polls for its
            # results, which takes a third of a core. We bind nothing. vLLM overrules "uni", so we name the class.
            arguments["distributed_executor_backend"] = _IN_ONE_PROCESS
        return arguments
    arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    if config.cache_bytes is not None:
        # With a given size vLLM measures nothing. Otherwise it would count memory that a trainer on the same device
        # allocates during the start as its own, and fail if the trainer freed some.
        arguments["kv_cache_memory_bytes"] = config.cache_bytes
    if sleep_mode:
        if "expandable_segments:True" in os.environ.get("PYTORCH_NPU_ALLOC_CONF", ""):
            raise EngineError(
                "launch.share_devices is sleep, but PYTORCH_NPU_ALLOC_CONF has expandable_segments:True, and then "
                "vllm-ascend cannot free memory. Unset it (the trainer sets it for its own processes)"
            )
        arguments["enable_sleep_mode"] = True
    if config.platform == "ascend" and config.additional_config:
        arguments["additional_config"] = config.additional_config
    return arguments


def environment_variables(config: VllmConfig) -> dict[str, str]:
    """Environment variables of vLLM and its processes."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(config.multiprocessing)),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if config.platform == "cpu":
        # vLLM would bind every engine of the machine to the same first cores.
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(config.threads)}
        # vLLM sets these for its engine process. Ours may be forked from a process that has already imported torch.
        variables |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1"}
        # vLLM's sampler compiles a small function at the first token, even in an eager engine. That takes 2 s per start
        # and saves nothing afterwards. Without a compiler, as in a lean container, the engine dies.
        if config.is_eager or not _can_compile():
            variables["TORCHDYNAMO_DISABLE"] = "1"
    if config.platform == "ascend":
        # Weights in the NZ layout cannot be replaced. torch_npu captures no graph at TASK_QUEUE_ENABLE=2.
        variables |= {"VLLM_ASCEND_ENABLE_NZ": "0", "TASK_QUEUE_ENABLE": "1"}

    # An engine is on one machine, so its workers meet on the loopback. The machine's name may resolve to an address
    # that they cannot reach.
    variables["VLLM_HOST_IP"] = LOOPBACK
    variables |= card_environment(LOOPBACK, BUILDS[config.platform].network_variables)
    return variables | config.environment


def set_environment(config: VllmConfig) -> None:
    """Set `environment_variables` that the user has not set. Call before vllm is imported."""
    for name, value in environment_variables(config).items():
        os.environ.setdefault(name, value)


def _can_compile() -> bool:
    """True if torch can compile: there is a C++ compiler, and Python's headers."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return shutil.which(os.environ.get("CXX", "g++")) is not None and headers.exists()


def installation_checks(platform: str) -> Sequence[Check]:
    """Checks of the installed vLLM for `async-grpo doctor`; `platform` is the trainer's."""
    checks = tuple(build.check for build in BUILDS.values() if build.device == platform)
    if checks:
        return checks

    def report_missing_engine() -> Finding:
        fix = f"set rollout.vllm.platform to {' or '.join(BUILDS)}, on this machine or another"
        return Finding("vLLM", False, f"there is no engine for {platform}", fix)

    return (report_missing_engine,)


def check_vllm_cpu() -> Finding:
    """Check that vLLM's build for CPUs is installed, and no other."""
    return _check_only_build("vllm-cpu", INSTALL_CPU)


def check_vllm_cuda() -> Finding:
    """Check that vLLM's build for GPUs is installed, and no other."""
    return _check_only_build("vllm", INSTALL_CUDA)


def check_vllm_ascend() -> Finding:
    """Check that vllm-ascend and the vLLM release that it extends are installed."""
    plugin = installed("vllm-ascend")
    vllm = installed("vllm")
    versions = f"vllm-ascend {plugin or 'not installed'}, vllm {vllm or 'not installed'}"
    if plugin is not None and vllm is not None and release(plugin) == release(vllm) == VLLM_ASCEND:
        return Finding("vLLM", True, versions, INSTALL_ASCEND)
    return Finding("vLLM", False, f"{versions}; required: {VLLM_ASCEND} of both", INSTALL_ASCEND)


def _check_only_build(package: str, fix: str) -> Finding:
    builds = {name: installed(name) for name in ("vllm-cpu", "vllm", "vllm-ascend")}
    versions = ", ".join(f"{name} {version}" for name, version in builds.items() if version)
    others = [name for name, version in builds.items() if version and name != package]
    if builds[package] and others:
        fix = f"pip uninstall {' '.join(others)}"
    return Finding("vLLM", bool(builds[package]) and not others, versions or "not installed", fix)


@dataclass(frozen=True, slots=True)
class VllmBuild:
    """The vLLM build of one platform."""

    device: str
    """Name of the device in vLLM, which is also the name of the trainer's platform."""
    install: str
    """Command that installs it."""
    check: Check
    network_variables: tuple[str, ...] = ()
    """Environment variables that name the network card of its collectives, in addition to gloo's."""


BUILDS = {
    "cpu": VllmBuild("cpu", INSTALL_CPU, check_vllm_cpu),
    "cuda": VllmBuild("cuda", INSTALL_CUDA, check_vllm_cuda, ("NCCL_SOCKET_IFNAME",)),
    "ascend": VllmBuild("npu", INSTALL_ASCEND, check_vllm_ascend, ("HCCL_SOCKET_IFNAME",)),
}
"""By `rollout.vllm.platform`."""
