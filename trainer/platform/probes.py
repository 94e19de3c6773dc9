"""Checks that platforms share, for `async-grpo doctor`: devices, what torch sees of them, and the installation."""

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
from trainer.platform.base import Device, Platform, Run, run_tool, visible

IMPORT_TIMEOUT_S = 180.0
"""Seconds to wait for a process that imports vLLM and Megatron-core: minutes on a cold or busy disk."""


def check_driver(platform: Platform, fix: str, run: Run = run_tool) -> Finding:
    """Whether the vendor's tool lists a device."""
    devices = platform.devices(run)
    found = f"{platform.tool}: driver {devices[0].driver}" if devices else f"{platform.tool} lists no device"
    return Finding("Driver", bool(devices), found, fix)


def check_devices(
    platform: Platform, fix: str, run: Run = run_tool, environment: Mapping[str, str] = os.environ
) -> Finding:
    """Which devices there are, their memory, and whether they are healthy and visible."""
    devices, variable = platform.devices(run), platform.visible_variable
    allowed = visible(platform, environment)
    if allowed == []:
        return Finding("Devices", False, f"{variable} is empty: none is visible", f"unset {variable}")
    unhealthy = [str(device.index) for device in devices if device.health not in ("OK", "Warning")]
    found = "; ".join(_kinds(devices)) or "none"
    if allowed is not None:
        found += f"; visible: {','.join(allowed)}"
    if unhealthy:
        return Finding("Devices", False, f"{found}; not healthy: {', '.join(unhealthy)}", f"{platform.tool} info")
    return Finding("Devices", bool(devices), found, fix)


def check_torch_sees(device: str, module: str, collective: str, fix: str, run: Run = run_tool) -> Finding:
    """Whether torch, in a process of its own, finds devices of the kind `device` and has its `collective` library.

    `module`: the package that adds the device to torch.
    """
    name = "torch and the devices"
    has = f"torch.distributed.is_{collective.lower()}_available()"
    program = f"import torch, {module}; print(torch.{device}.device_count(), {has})"
    words = (run([sys.executable, "-c", program]) or "").split()
    if len(words) != 2:
        return Finding(name, False, f"`import {module}` fails", fix)
    count, available = words[0], words[1] == "True"
    found = f"torch sees {count}; {collective} {'is there' if available else 'is missing'}"
    return Finding(name, count != "0" and available, found, fix)


def check_private_names(run: Run = partial(run_tool, timeout_s=IMPORT_TIMEOUT_S)) -> Finding:
    """Whether all undocumented names that we use of other packages are there, in a process that imports them."""
    if not any(private.found() for private in PRIVATE_NAMES.values()):
        return Finding("Private names", None, "none of the packages is installed")
    lines = (run([sys.executable, "-m", "async_grpo.utils.private_names"]) or "").splitlines()
    pairs = [line.split("\t") for line in lines if "\t" in line]
    wrong = [reason for _, reason in pairs if reason]
    if wrong or not pairs:
        reason, _, fix = "; ".join(wrong).partition(" Run: ") if wrong else ("the packages cannot be imported", "", "")
        return Finding("Private names", False, reason, fix or f"{sys.executable} -m async_grpo.utils.private_names")
    return Finding("Private names", True, f"all there: {', '.join(package for package, _ in pairs)}")


check_megatron = partial(exactly, "Megatron-core", "megatron-core", MEGATRON_CORE)


def common_probes(install: str) -> tuple[Check, ...]:
    """The checks of the installation that all platforms share; `install` is the command for one of them."""
    return (
        partial(present, "transformers", "transformers", install),
        partial(check_megatron, install),
        partial(optional, "TensorBoard", "tensorboard", "pip install tensorboard"),
        check_private_names,
    )


def _kinds(devices: Sequence[Device]) -> list[str]:
    """`8 x NVIDIA H100 80GB HBM3, 79.6 GiB`, one for each kind."""
    kinds = Counter((device.name, round(device.memory_gib, 1)) for device in devices)
    return [f"{count} x {name}, {memory:g} GiB" for (name, memory), count in kinds.items()]
