"""The NPU platform on a CPU: MindSpeed's Python runs unchanged over Megatron, and the device is imitated.

    torch_npu (stand-in) -> mindspeed.megatron_adaptor -> CpuPlatform's replacements -> repatch(our arguments)

`unpacked_source` finds MindSpeed: the folder MINDSPEED_SOURCE, or the archive that lies beside the project. torch_npu
and what else MindSpeed imports for a device are modules whose every attribute is a mock, but for the operators, which
`npu_operators` computes. An operator that is not there raises.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import tarfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from async_grpo.config.trainer import TrainerConfig
from tests.support import npu_operators
from trainer.platform import npu
from trainer.platform.base import import_package
from trainer.platform.cpu_patches import patch_for_cpu, report_cuda_types_to_optimizers

_ARCHIVE = Path(__file__).parents[3] / "shared" / "upstream" / "mindspeed-core_r0.16.0.tar.xz"
_ABSENT = ("torch_npu", "acl", "triton", "torchair", "scipy")
_KERNELS = ("mindspeed.ops.triton.l2norm", "mindspeed.ops.triton.utils", "mindspeed.core.ssm.chunk_gated_delta_rule")
"""Modules of MindSpeed that are nothing but device kernels."""


def unpacked_source(folder: Path) -> Path:
    """The folder that holds the package `mindspeed`; the archive is unpacked into `folder`. Skips the test without."""
    if given := os.environ.get("MINDSPEED_SOURCE"):
        return Path(given)
    if not _ARCHIVE.exists():
        pytest.skip("no source of MindSpeed: set MINDSPEED_SOURCE to a clone of it")
    with tarfile.open(_ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.iterdir())


class NpuOnCpu(npu.NpuPlatform):
    """The NPU platform with MindSpeed and its layers, on the CPU and over gloo."""

    device = "cpu"
    backend = "gloo"

    def __init__(self, source: Path) -> None:
        self._source = source

    def activate(self, config: TrainerConfig) -> None:
        """The platform's own; Megatron's CUDA calls are answered by the CPU as soon as MindSpeed has been imported."""
        sys.meta_path.insert(0, _StandIns())
        sys.path.insert(0, str(self._source))
        import torch
        import torch_npu

        torch.npu = torch_npu.npu
        torch.npu.current_device = lambda: "cpu"
        torch.npu.device_count = lambda: config.processes
        for name in _KERNELS:
            sys.modules[name] = _StandIn(name)
        npu.import_package = _import_for_cpu  # type: ignore[attr-defined]
        super().activate(config)
        from mindspeed.ops import npu_rotary_position_embedding as rotary  # the one that MindSpeed compiles itself

        rotary.rope_op_builder.load = lambda: npu_operators
        # Beneath MindSpeed's wrappers the CPU's replacement does not see who calls it.
        report_cuda_types_to_optimizers()
        torch.nn.Parameter.type = torch.Tensor.type

    def _torch_device(self) -> Any:
        import torch

        return torch.npu


def _import_for_cpu(platform: str, module: str, fix: str) -> Any:
    found = import_package(platform, module, fix)
    if module == "mindspeed.megatron_adaptor":
        patch_for_cpu()
    return found


class _StandIn(types.ModuleType):
    """A module in which every name is a mock."""

    __version__ = "2.10.0.post4"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        found = getattr(npu_operators, name, None) if name in npu_operators.SCHEMAS else None
        if found is None:
            found = MagicMock(name=f"{self.__name__}.{name}")
            found.__name__ = name
            if name.startswith("npu_"):
                found.side_effect = NotImplementedError(f"{name} is not among tests/support/npu_operators.py")
        setattr(self, name, found)
        return found


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages that are absent on a CPU."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        absent = name.partition(".")[0] in _ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StandIn(spec.name)
        module.__path__ = []
        module.__file__ = f"{spec.name}/__init__.py"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: the module's names are made when they are asked for."""
