"""Checks of the accelerators: driver, devices, what is visible, the vendor's software below torch."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from async_grpo.devices import TOOLS, VISIBLE, Device, Run, devices_of, run_tool, visible
from async_grpo.doctor.finding import Finding
from async_grpo.versions import CANN, SOURCE_CANN

DRIVER_FIX = {
    "cuda": "install the NVIDIA driver; in a container: docker run --gpus all",
    "npu": "install the Ascend driver and firmware; in a container: --device /dev/davinci0 (and the others) "
    "--device /dev/davinci_manager --device /dev/hisi_hdc -v /usr/local/dcmi:/usr/local/dcmi "
    "-v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi",
}
CANN_FOLDERS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann", "/usr/local/Ascend/latest")
_VERSION = re.compile(r"^\s*(?:version|Version|package_version)\s*=\s*[\"']?([0-9][0-9A-Za-z.]*)", re.MULTILINE)


def check_driver(platform: str, run: Run = run_tool) -> Finding:
    """The vendor's tool answers."""
    devices = devices_of(platform, run)
    tool = TOOLS[platform]
    found = f"{tool}: driver {devices[0].driver}" if devices else f"{tool} lists no device"
    return Finding("Driver", bool(devices), found, DRIVER_FIX[platform])


def check_devices(platform: str, run: Run = run_tool, environment: Mapping[str, str] = os.environ) -> Finding:
    """Which there are, how large, healthy, and allowed by the environment."""
    devices = devices_of(platform, run)
    allowed = visible(platform, environment)
    if allowed == []:
        return Finding("Devices", False, f"{VISIBLE[platform]} is empty: none is visible", f"unset {VISIBLE[platform]}")
    ill = [device.index for device in devices if device.health not in ("OK", "Warning")]
    found = "; ".join(_kinds(devices)) or "none"
    if allowed is not None:
        found += f"; visible: {','.join(allowed)}"
    if ill:
        return Finding("Devices", False, f"{found}; not healthy: {', '.join(map(str, ill))}", f"{TOOLS[platform]} info")
    return Finding("Devices", bool(devices), found, DRIVER_FIX[platform])


def check_torch_sees(platform: str, run: Run = run_tool) -> Finding:
    """torch, in a process of its own, finds the devices that the driver has; its collectives are there."""
    module, collective = ("torch", "nccl") if platform == "cuda" else ("torch_npu", "hccl")
    count = f"torch.{platform}.device_count()"
    has = "torch.distributed.is_nccl_available()" if platform == "cuda" else "torch.distributed.is_hccl_available()"
    program = f"import torch, {module}; print({count}, {has})"
    words = (run([sys.executable, "-c", program]) or "").split()
    if len(words) != 2:
        return Finding("torch and the devices", False, f"`import {module}` fails", _torch_fix(platform))
    right = words[0] != "0" and words[1] == "True"
    found = f"torch sees {words[0]}; {collective.upper()} {'is there' if words[1] == 'True' else 'is missing'}"
    return Finding("torch and the devices", right, found, _torch_fix(platform))


def check_cann(environment: Mapping[str, str] = os.environ, folders: tuple[str, ...] = CANN_FOLDERS) -> Finding:
    """CANN's environment is set in this shell, and its version is the one that torch_npu is for."""
    home = environment.get("ASCEND_HOME_PATH") or environment.get("ASCEND_TOOLKIT_HOME")
    if home is None:
        there = [folder for folder in folders if Path(folder).is_dir()]
        found = f"installed in {there[0]}, but its environment is not set" if there else "not installed"
        return Finding("CANN", False, found, SOURCE_CANN if there else f"install CANN {CANN} (toolkit, kernels, NNAL)")
    version = _cann_version(Path(home))
    if version is None:
        return Finding("CANN", None, f"{home}, version unknown (written for {CANN})", SOURCE_CANN)
    right = version.startswith(CANN)
    found = f"{version} in {home}" + ("" if right else f", not {CANN}")
    return Finding("CANN", right, found, f"install CANN {CANN}, then {SOURCE_CANN}")


def _cann_version(home: Path) -> str | None:
    """CANN's installer leaves files with a line `Version=...`."""
    patterns = (
        "version.cfg",
        "*/ascend_toolkit_install.info",
        "*/version.info",
        "version.info",
        "share/info/*/version.info",
    )
    for pattern in patterns:
        for path in sorted(home.glob(pattern)):
            if match := _VERSION.search(path.read_text(errors="replace")):
                return match.group(1)
    return None


def _kinds(devices: list[Device]) -> list[str]:
    """`8 x NVIDIA H100 80GB HBM3, 79.6 GiB`, one for each kind."""
    kinds: dict[tuple[str, float], int] = {}
    for device in devices:
        key = (device.name, round(device.memory_gib, 1))
        kinds[key] = kinds.get(key, 0) + 1
    return [f"{count} x {name}, {memory:g} GiB" for (name, memory), count in kinds.items()]


def _torch_fix(platform: str) -> str:
    if platform == "cuda":
        return "python -c 'import torch; torch.cuda.init()' says why; check the driver against torch's CUDA version"
    return f"python -c 'import torch, torch_npu' says why; {SOURCE_CANN}"
