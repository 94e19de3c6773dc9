"""The accelerators of this machine, as the vendors' own tools list them; no framework is imported.

nvidia-smi --query-gpu=...   one line a GPU
npu-smi info                 a table, two lines an NPU
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
