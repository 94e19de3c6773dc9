"""Checks for `async-grpo doctor` that platforms share: driver, devices, devices visible to torch, installation."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

from async_grpo.utils.private_names import PRIVATE_NAMES
from async_grpo.utils.requirements import (
    MEGATRON_CORE,
    Check,
    Finding,
    exactly,
    optional,
    present,
)
from trainer.platform.base import Device, Platform, RunTool, run_tool, visible_devices

IMPORT_TIMEOUT_S = 180.0
"""Seconds to wait for a process that imports vLLM and Megatron-core. It takes minutes on a cold or busy disk."""


def check_driver(platform: Platform, fix: str, run: RunTool = run_tool) -> Finding:
    """Check that the vendor's tool lists a device."""
    devices = platform.list_devices(run)
    if not devices:
        return Finding("Driver", False, f"{platform.tool} lists no device", fix)
    return Finding("Driver", True, f"{platform.tool}: driver {devices[0].driver}", fix)


def check_devices(
    platform: Platform, fix: str, run: RunTool = run_tool, environment: Mapping[str, str] = os.environ
) -> Finding:
    """List the devices with their memory, and check that they are healthy and visible."""
    variable = platform.visible_variable
    visible = visible_devices(platform, environment)
    if visible == []:
        return Finding("Devices", False, f"{variable} is empty: none is visible", f"unset {variable}")

    devices = platform.list_devices(run)
    state = "; ".join(_describe_kinds(devices)) or "none"
    if visible is not None:
        state += f"; visible: {','.join(visible)}"
    unhealthy = [str(device.index) for device in devices if device.health not in ("OK", "Warning")]
    if unhealthy:
        return Finding("Devices", False, f"{state}; not healthy: {', '.join(unhealthy)}", f"{platform.tool} info")
    return Finding("Devices", bool(devices), state, fix)


def check_torch_sees(device: str, module: str, collective: str, fix: str, run: RunTool = run_tool) -> Finding:
    """Check that torch finds devices of the kind `device` and has its `collective` library.

    `module`: the package that adds the device to torch. Imports it in a child process, because the doctor must keep
    running if the import crashes, and must not occupy a device.
    """
    name = "torch and the devices"
    has_collective = f"torch.distributed.is_{collective.lower()}_available()"
    program = f"import torch, {module}; print(torch.{device}.device_count(), {has_collective})"
    words = (run([sys.executable, "-c", program]) or "").split()
    if len(words) != 2:
        return Finding(name, False, f"`import {module}` fails", fix)

    count = words[0]
    is_available = words[1] == "True"
    state = f"torch sees {count}; {collective} {'is there' if is_available else 'is missing'}"
    return Finding(name, count != "0" and is_available, state, fix)


def check_private_names(run: RunTool = partial(run_tool, timeout_s=IMPORT_TIMEOUT_S)) -> Finding:
    """Check in a child process that other packages still have all undocumented names that we use."""
    name = "Undocumented names"
    if not any(private.found() for private in PRIVATE_NAMES.values()):
        return Finding(name, None, "none of the packages is installed")

    command = [sys.executable, "-m", "async_grpo.utils.private_names"]
    lines = (run(command) or "").splitlines()
    results = [line.split("\t") for line in lines if "\t" in line]
    if not results:
        return Finding(name, False, "the packages cannot be imported", " ".join(command))

    problems = [problem for _, problem in results if problem]
    if problems:
        state, _, fix = "; ".join(problems).partition(" Run: ")
        return Finding(name, False, state, fix or " ".join(command))
    return Finding(name, True, f"found: {', '.join(package for package, _ in results)}")


check_megatron = partial(exactly, "Megatron-core", "megatron-core", MEGATRON_CORE)


def common_probes(install: str) -> tuple[Check, ...]:
    """Return the checks of packages that all platforms need. `install`: the installation command of the platform."""
    return (
        partial(present, "transformers", "transformers", install),
        partial(check_megatron, install),
        partial(optional, "TensorBoard", "tensorboard", "pip install tensorboard"),
        check_private_names,
    )


def _describe_kinds(devices: Sequence[Device]) -> list[str]:
    """Return `8 x NVIDIA H100 80GB HBM3, 79.6 GiB` for each kind of device."""
    kinds = Counter((device.name, round(device.memory_gib, 1)) for device in devices)
    return [f"{count} x {name}, {memory:g} GiB" for (name, memory), count in kinds.items()]
