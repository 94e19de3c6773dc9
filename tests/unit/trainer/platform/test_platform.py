"""What one platform alone does: order of imports, MindSpeed's arguments, peak FLOP/s, missing packages."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from async_grpo.config.trainer import TrainerConfig
from async_grpo.errors import ConfigError, DependencyError
from async_grpo.utils.requirements import MEGATRON_CORE
from tests.support.imitated_devices import Event, imitate_devices, install
from trainer.platform import select_platform
from trainer.platform.base import run_tool
from trainer.platform.cuda import peak_tflops

LAYOUT = TrainerConfig(platform="npu", processes=8, tensor_parallel=4, pipeline_parallel=2, sequence_parallel=True)


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    found = imitate_devices(tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "argv", ["trainer.main", "--config", "run.yaml"])
    return found


def test_a_tool_that_is_not_installed_or_fails_is_no_error() -> None:
    assert run_tool(["no-such-tool-anywhere"]) is None
    assert run_tool(["false"]) is None
    assert run_tool(["echo", "here"]) == "here\n"


@pytest.mark.usefixtures("events")
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_streams_of_a_gpu_share_one_hardware_queue_only_where_ranks_are_tensor_parallel(tensor_parallel: int) -> None:
    config = TrainerConfig(platform="cuda", processes=2, tensor_parallel=tensor_parallel)
    select_platform("cuda").activate(config)
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == (None if tensor_parallel == 1 else "1")
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("name", ["cpu", "npu"])
def test_what_changes_megatron_refuses_to_come_after_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    with pytest.raises(ConfigError, match="megatron is imported"):
        select_platform(name).activate(TrainerConfig())


def test_the_installed_megatron_is_the_one_that_the_trainer_is_written_for() -> None:
    assert importlib.metadata.version("megatron-core") == MEGATRON_CORE


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H200", "bfloat16", 989),
        ("NVIDIA A10G", "bfloat16", 70),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165),
        ("NVIDIA H100 PCIe", "float8", None),
        ("Ascend910B2", "bfloat16", None),
    ],
)
def test_a_device_is_known_by_the_words_of_its_name(device: str, precision: str, expected: float | None) -> None:
    assert peak_tflops(device, precision) == expected


def test_npu_imports_the_adaptor_after_torch_npu_and_tells_it_how_the_ranks_are_cut(events: list[Event]) -> None:
    select_platform("npu").activate(LAYOUT)
    assert events[:-1] == [("torch_npu",), ("device", 0), ("mindspeed", False, [])]
    assert sys.argv == ["trainer.main", "--config", "run.yaml"]
    name, arguments, argv = events[-1]
    assert (name, argv) == ("repatch", [])
    expected = {
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "sequence_parallel": True,
    }
    assert arguments.items() >= expected.items()


@pytest.mark.usefixtures("events")
@pytest.mark.parametrize(
    ("module", "fix"),
    [("torch_npu", "ascend --only torch --only packages"), ("mindspeed.megatron_adaptor", "ascend --only mindspeed")],
)
def test_npu_names_the_package_that_is_missing_and_what_to_type(
    monkeypatch: pytest.MonkeyPatch, module: str, fix: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DependencyError, match=f"{module} .*{fix}"):
        select_platform("npu").activate(TrainerConfig())


@pytest.mark.usefixtures("events")
def test_npu_refuses_a_torch_npu_that_is_built_for_another_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "other", "torch-npu", "1.11.0")
    monkeypatch.syspath_prepend(tmp_path / "other")
    with pytest.raises(DependencyError, match=r"torch-npu 1\.11\.0, .*torch 1\.11\.0, .*async-grpo install"):
        select_platform("npu").activate(TrainerConfig())


@pytest.mark.usefixtures("events")
def test_npu_refuses_a_mindspeed_that_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = select_platform("npu")
    platform.activate(LAYOUT)
    monkeypatch.delattr(sys.modules["mindspeed.megatron_adaptor"], "repatch")
    with pytest.raises(DependencyError, match=r"repatch.*branch"):
        platform.activate(LAYOUT)


def test_what_a_rank_imports_before_it_activates_its_platform_loads_neither_transformers_nor_megatron() -> None:
    program = (
        "import sys, trainer.main, trainer.platform as platform\n"
        "platform.list_platforms()\n"
        "print(sorted({'transformers', 'megatron', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
