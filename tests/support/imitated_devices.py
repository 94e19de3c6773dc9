"""Devices that are not there: what nvidia-smi and npu-smi print, torch's modules of them, torch_npu and MindSpeed."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.platform import cuda, npu

NVIDIA = """\
0, NVIDIA H100 80GB HBM3, 81559, 550.54.15
1, NVIDIA L4, 23034, 550.54.15
"""
NPU = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.0                   Version: 25.2.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B2               | OK            | 93.5        46                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3388 / 65536         |
+===========================+===============+====================================================+
| 1     910B2               | Alarm         | 91.1        44                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3389 / 65536         |
+===========================+===============+====================================================+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
+===========================+===============+====================================================+
"""
TWO_CHIPS = """\
| npu-smi 25.2.0                   Version: 25.2.0                                               |
| 0     Ascend910           | OK            | 165.6       36                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3154 / 65536         |
| 0     Ascend910           | OK            | -           34                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          2885 / 65536         |
"""
ADAPTOR = """
import sys, ascend_log
ascend_log.events.append(('mindspeed', 'megatron.core' in sys.modules, sys.argv[1:]))
def repatch(arguments):
    ascend_log.events.append(('repatch', arguments, sys.argv[1:]))
"""
_NORMS = ("mindspeed.core", "mindspeed.core.megatron_basic", "mindspeed.core.megatron_basic.megatron_basic")
Event = tuple[Any, ...]


def says(text: str | None) -> Callable[[Sequence[str]], str | None]:
    """A vendor's tool that prints `text`."""
    return lambda arguments: text


def imitate_devices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Two GPUs and two NPUs for a platform to activate; returns what happens to them, in order.

    Megatron is as if not imported, and the environment of the platforms is as if not set, until the test ends.
    """
    events: list[Event] = []
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
    for name in {
        *cuda.ENVIRONMENT,
        *cuda.TENSOR_PARALLEL_ENVIRONMENT,
        *npu.ENVIRONMENT,
        "LOCAL_RANK",
        "ASCEND_RT_VISIBLE_DEVICES",
    }:
        monkeypatch.setenv(name, "")  # so that it is taken away again
        del os.environ[name]
    for name, function in _torch_device("NVIDIA H100 80GB HBM3", events).items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch, "npu", types.SimpleNamespace(**_torch_device("Ascend910B2", events)), raising=False)
    _write_ascend_packages(folder)
    log = types.ModuleType("ascend_log")
    log.events = events  # type: ignore[attr-defined]
    for name in ("torch_npu", "mindspeed", "mindspeed.megatron_adaptor", *_NORMS):
        monkeypatch.setitem(sys.modules, name, log)  # so that it is taken away again
        del sys.modules[name]
    monkeypatch.setitem(sys.modules, "ascend_log", log)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    return events


def _torch_device(name: str, events: list[Event]) -> dict[str, Any]:
    """The functions of `torch.cuda`, and of `torch.npu`, that a platform calls."""
    return {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "set_device": lambda rank: events.append(("device", rank)),
        "get_device_name": lambda: name,
        "get_device_capability": lambda: (9, 0),
        "current_device": lambda: 0,
        "get_device_properties": lambda device: types.SimpleNamespace(total_memory=64 << 30),
        "memory_allocated": lambda: 3 << 30,
        "max_memory_allocated": lambda: 5 << 30,
        "set_per_process_memory_fraction": lambda share, device: events.append(("share", share, device)),
        "empty_cache": lambda: events.append(("emptied",)),
        "reset_peak_memory_stats": lambda: events.append(("reset",)),
        "synchronize": lambda: events.append(("synchronize",)),
    }


def _write_ascend_packages(folder: Path) -> None:
    """torch_npu and MindSpeed as they look from outside."""
    (folder / "torch_npu.py").write_text("import ascend_log\nascend_log.events.append(('torch_npu',))\n")
    (folder / "mindspeed").mkdir()
    (folder / "mindspeed" / "__init__.py").touch()
    (folder / "mindspeed" / "megatron_adaptor.py").write_text(ADAPTOR)
    norms = folder.joinpath(*_NORMS[-1].split("."))
    norms.parent.mkdir(parents=True)
    norms.with_suffix(".py").write_text("class PTNorm: ...\n")
    install(folder, "torch-npu", torch.__version__.partition("+")[0] + ".post4")


def install(folder: Path, name: str, version: str) -> None:
    """Install a package as far as pip's records go."""
    records = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    records.mkdir(parents=True)
    (records / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
