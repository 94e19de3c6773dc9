"""MindSpeed's patches over Megatron-core on a CPU: its Python runs unchanged, and mocks stand in for the device.

    mindspeed.megatron_adaptor  ->  CpuPlatform's replacements  ->  repatch(our arguments)

`unpacked_source` finds MindSpeed: the folder MINDSPEED_SOURCE, or the archive that lies beside the project. torch_npu
and what else MindSpeed imports for a device are modules whose every attribute is a mock. The only operator of these
that a dense model calls is the fused AdamW, which torch has for the CPU, too.
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
from trainer.platform.cpu import CpuPlatform
from trainer.platform.cpu_patches import patch_for_cpu, show_optimizers_cuda_types
from trainer.platform.npu import empty_command_line, mindspeed_arguments

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


class MindSpeedOnCpu(CpuPlatform):
    """The CPU platform, with Megatron patched by MindSpeed as it is on NPUs."""

    def __init__(self, source: Path) -> None:
        self._source = source

    def activate(self, config: TrainerConfig) -> None:
        """Let MindSpeed patch before Megatron is imported, answer its CUDA calls by the CPU, and patch by our
        arguments."""
        sys.meta_path.insert(0, _StandIns())
        sys.path.insert(0, str(self._source))
        import torch
        import torch_npu

        torch.set_num_threads(config.threads)
        torch.npu = torch_npu.npu
        torch.npu.current_device = lambda: "cpu"
        for name in _KERNELS:
            sys.modules[name] = _StandIn(name)
        with empty_command_line():
            adaptor = importlib.import_module("mindspeed.megatron_adaptor")
            patch_for_cpu()
            adaptor.repatch(mindspeed_arguments(config))
        # Beneath MindSpeed's wrappers the CPU's replacement does not see who calls it.
        show_optimizers_cuda_types()
        torch.nn.Parameter.type = torch.Tensor.type


class _StandIn(types.ModuleType):
    """A module in which every name is a mock."""

    __version__ = "2.10.0.post4"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        found = MagicMock(name=f"{self.__name__}.{name}")
        found.__name__ = name
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
        module.__path__, module.__file__ = [], f"{spec.name}/__init__.py"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: the module's names are made when they are asked for."""
