"""What the trainer asks of the machine it runs on.

    main --activate--> megatron may be imported --configure--> process groups --layer_replacements--> model

Nothing else in the trainer asks for the kind of device: tensors of the model and of its micro-batches live on
`device`, everything that ranks tell each other beside Megatron (bytes, integers, statistics) lives on the CPU, and
the process group's `backend` has one transport for each of the two.

The accelerators of this machine, as the vendors' own tools list them; no framework is imported.

nvidia-smi --query-gpu=...   one line a GPU
npu-smi info                 a table, two lines an NPU

Checks of the accelerators: driver, devices, what is visible, the vendor's software below torch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from async_grpo.config.trainer import TrainerConfig
from async_grpo.errors import ConfigError, DependencyError
from async_grpo.utils.requirements import CANN, INSTALL_MEGATRON, MEGATRON_CORE, SOURCE_CANN, Finding, installed

TOOLS = {"cuda": "nvidia-smi", "npu": "npu-smi"}


VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""By platform: the environment variable that says which devices a process may use."""


PATIENCE_S = 20.0


_QUERY = ("--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader,nounits")


_NPU = re.compile(r"^\|\s*\d+\s+(?P<name>\S+)\s*\|\s*(?P<health>\w+)\s*\|.*$")


_CHIP = re.compile(r"^\|[\s\d]+\|\s*[0-9A-Fa-f]{4}:\S+\s*\|.*?\d+\s*/\s*(?P<total>\d+)\s*\|\s*$")


_NPU_VERSION = re.compile(r"Version:\s*(\S+)")


Run = Callable[[Sequence[str]], str | None]
"""Arguments -> standard output; None if the tool is not there or failed."""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator."""

    index: int
    name: str
    memory_gib: float
    driver: str
    health: str = "OK"


def devices_of(platform: str, run: Run | None = None) -> list[Device]:
    """All devices of `cuda` or `npu` on this machine, visible to this process or not; [] without the vendor's tool."""
    run = run or run_tool
    if platform == "cuda":
        return parse_nvidia(run([TOOLS["cuda"], *_QUERY]) or "")
    if platform == "npu":
        return parse_npu(run([TOOLS["npu"], "info"]) or "")
    return []


def parse_nvidia(text: str) -> list[Device]:
    """
    >>> parse_nvidia("0, NVIDIA H100 80GB HBM3, 81559, 550.54.15")[0].name
    'NVIDIA H100 80GB HBM3'
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [
        Device(int(index), name, float(memory) / 1024, driver)
        for index, name, memory, driver in (row for row in rows if len(row) == 4)
        if index.isdigit() and memory.replace(".", "").isdigit()
    ]


def parse_npu(text: str) -> list[Device]:
    """An NPU's first line names it; its second ends with the use of its HBM, `used / total` in MB. An NPU of two chips
    has two second lines, and counts as two devices, as it does for torch."""
    version = _NPU_VERSION.search(text)
    driver, name, health = version.group(1) if version else "unknown", "", ""
    found: list[Device] = []
    for line in text.splitlines():
        if chip := _CHIP.match(line):
            found.append(Device(len(found), f"Ascend{name}", float(chip["total"]) / 1024, driver, health))
        elif npu := _NPU.match(line):
            name, health = npu["name"], npu["health"]
    return found


def smallest_memory_gib(platform: str, run: Run | None = None) -> float | None:
    """Of the devices of this machine; None if there are none."""
    return min((device.memory_gib for device in devices_of(platform, run)), default=None)


def visible(platform: str, environment: Mapping[str, str]) -> list[str] | None:
    """The devices that the environment allows, as it names them; None if it says nothing."""
    value = environment.get(VISIBLE[platform])
    return None if value is None else [part.strip() for part in value.split(",") if part.strip()]


def run_tool(arguments: Sequence[str], patience_s: float | None = None) -> str | None:
    """What the tool prints; None if it is not installed, fails or hangs."""
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=patience_s or PATIENCE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


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


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of one device (or, on the CPU, of this process and of the machine)."""

    used_bytes: int
    peak_bytes: int
    """Most that was in use since `reset_peak_memory`."""
    total_bytes: int


class LayerRole(StrEnum):
    """The places of a layer that a platform may fill with classes of its own (`model/layers.py` puts them in)."""

    norm = "norm"
    attention = "attention"
    column_linear = "column_linear"
    row_linear = "row_linear"


class Platform(Protocol):
    """One kind of accelerator (or none)."""

    name: str
    device: str
    """torch device of parameters and micro-batches."""
    backend: str
    """torch.distributed backends, by kind of device."""

    def activate(self, threads: int) -> None:
        """Make this process ready, once, before anything imports megatron: environment, packages, its own device.

        Raises ConfigError if the device is not there, DependencyError if a package is not.
        """
        ...

    def configure(self, config: TrainerConfig) -> None:
        """Tell what stands below Megatron how the ranks are cut; before Megatron's groups are made."""
        ...

    def layer_replacements(self, config: Any) -> Mapping[LayerRole, type]:
        """Classes that take the places of our own layers, for a `TransformerConfig`; {} where ours stand.

        Raises DependencyError if a package that has them is installed but does not load.
        """
        ...

    def synchronize(self) -> None:
        """Wait until the device has done what it was given, so that a clock measures it."""
        ...

    def memory(self) -> MemoryUse:
        """Of this rank's device, now."""
        ...

    def reset_peak_memory(self) -> None:
        """Begin a new measurement of the peak."""
        ...

    def peak_flops(self, precision: str) -> float | None:
        """Dense FLOP/s of one device at `precision` (float32, bfloat16); None where it is not known."""
        ...


def local_rank() -> int:
    """Which of this machine's ranks this is; 0 for one that was started by itself."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def set_defaults(environment: dict[str, str]) -> None:
    """Where the user's own environment has not said otherwise."""
    for name, value in environment.items():
        os.environ.setdefault(name, value)


def require_megatron(platform: str) -> None:
    """Raises ConfigError for another version than the one that the trainer is written for, or none."""
    found = installed("megatron-core")
    if found != MEGATRON_CORE:
        raise ConfigError(
            f"the {platform} platform is written for megatron-core {MEGATRON_CORE}, but {found or 'none'} is "
            f"installed. Run: {INSTALL_MEGATRON}"
        )


def require_own_device(platform: str, rank: int, devices: int, variable: str) -> None:
    """Raises ConfigError if this rank has no device of its own among those that are visible."""
    if rank >= devices:
        raise ConfigError(
            f"rank {rank} of this machine needs a {platform} device of its own, but {devices} are visible "
            f"({variable}={os.environ.get(variable, 'not set')}). Lower trainer.processes, or give more in {variable}"
        )


def missing(platform: str, package: str, error: Exception, fix: str) -> DependencyError:
    """What to raise when a package cannot be imported."""
    why = f"{type(error).__name__}: {error}"
    return DependencyError(f"trainer.platform is {platform}, but {package} cannot be imported ({why}). Run: {fix}")
