"""A platform is chosen explicitly, and refuses what it was not written for."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from async_grpo.config.trainer import TrainerConfig
from async_grpo.errors import ConfigError, DependencyError
from async_grpo.utils.requirements import MEGATRON_CORE
from trainer.platform import Platform, cuda, npu, select_platform
from trainer.platform.cuda import peak_tflops

FIGURES = TrainerConfig(
    platform="npu", processes=8, tensor_parallel=4, pipeline_parallel=2, sequence_parallel=True, device_peak_tflops=300
)


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Megatron not imported, the platforms' environment unset, and both as before afterwards."""
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)  # another test may have imported it
    for name in {*cuda.ENVIRONMENT, *npu.ENVIRONMENT, "LOCAL_RANK", "ASCEND_RT_VISIBLE_DEVICES"}:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two GPUs as torch would show them; the devices that were taken."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    return taken


@pytest.fixture
def ascend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """torch_npu and MindSpeed as they look from outside, with two NPUs; what happened to them, in order."""
    events: list[tuple[Any, ...]] = []
    log = types.ModuleType("ascend_log")
    log.events = events  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ascend_log", log)
    (tmp_path / "torch_npu.py").write_text("import sys, ascend_log\nascend_log.events.append(('torch_npu',))\n")
    (tmp_path / "mindspeed").mkdir()
    (tmp_path / "mindspeed" / "__init__.py").write_text("")
    (tmp_path / "mindspeed" / "megatron_adaptor.py").write_text(
        "import sys, ascend_log\n"
        "ascend_log.events.append(('mindspeed', 'megatron.core' in sys.modules, sys.argv[1:]))\n"
        "def repatch(arguments):\n"
        "    ascend_log.events.append(('repatch', arguments, sys.argv[1:]))\n"
    )
    install(tmp_path, "torch-npu", torch.__version__.partition("+")[0] + ".post4")
    devices = types.SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        set_device=lambda rank: events.append(("device", rank)),
        get_device_name=lambda: "Ascend910B2",
    )
    monkeypatch.setattr(torch, "npu", devices, raising=False)
    for name in ("torch_npu", "mindspeed", "mindspeed.megatron_adaptor"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))  # so that it is taken away again
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trainer.main", "--config", "run.yaml"])
    return events


def install(folder: Path, name: str, version: str) -> None:
    """As far as pip's records go."""
    records = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    records.mkdir()
    (records / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def refuse(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)


def test_an_unknown_platform_is_refused_not_replaced() -> None:
    with pytest.raises(ConfigError, match=r"'abacus'.*cpu, cuda or npu"):
        select_platform("abacus")


@pytest.mark.parametrize("name", ["cpu", "npu"])
def test_what_changes_megatron_refuses_to_come_after_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    with pytest.raises(ConfigError, match="before megatron is imported"):
        select_platform(name).activate(1)


@pytest.mark.parametrize("name", ["cpu", "cuda", "npu"])
def test_every_platform_refuses_another_megatron(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.17.0")
    with pytest.raises(ConfigError, match=r"pip install megatron-core=="):
        select_platform(name).activate(1)


def test_the_installed_megatron_is_the_one_that_the_trainer_is_written_for() -> None:
    assert importlib.metadata.version("megatron-core") == MEGATRON_CORE


@pytest.mark.parametrize("name", ["cpu", "cuda", "npu"])
def test_every_platform_has_the_whole_interface(name: str) -> None:
    platform: Platform = select_platform(name)
    assert platform.name == name
    assert all(
        callable(getattr(platform, method)) for method in ("activate", "configure", "layer_replacements", "memory")
    )
    assert "gloo" in platform.backend


def test_the_cpu_platform_measures_its_process_and_knows_no_peak() -> None:
    use = select_platform("cpu").memory()
    assert 0 < use.used_bytes <= use.total_bytes
    assert use.peak_bytes > 100 << 20
    assert select_platform("cpu").peak_flops("bfloat16") is None


def test_cuda_without_a_gpu_says_what_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES.*doctor --platform cuda"):
        select_platform("cuda").activate(1)


def test_cuda_takes_the_gpu_of_its_rank_and_leaves_the_users_environment(
    monkeypatch: pytest.MonkeyPatch, gpus: list[int]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    select_platform("cuda").activate(1)
    assert gpus == [1]
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize(("name", "variable"), [("cuda", "CUDA_VISIBLE_DEVICES"), ("npu", "ASCEND_RT_VISIBLE_DEVICES")])
def test_a_rank_without_a_device_of_its_own_is_refused(
    monkeypatch: pytest.MonkeyPatch, gpus: list[int], ascend: list[tuple[Any, ...]], name: str, variable: str
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=f"rank 2.*2 are visible.*{variable}"):
        select_platform(name).activate(1)


def test_peak_flops_are_the_vendors_unless_they_are_configured(gpus: list[int]) -> None:
    platform = select_platform("cuda")
    assert platform.peak_flops("bfloat16") == 989e12
    platform.configure(TrainerConfig(platform="cuda", device_peak_tflops=400))
    assert platform.peak_flops("bfloat16") == 400e12


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


def test_npu_imports_the_adaptor_after_torch_npu_and_before_megatron(
    monkeypatch: pytest.MonkeyPatch, ascend: list[tuple[Any, ...]]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    select_platform("npu").activate(1)
    assert ascend == [("torch_npu",), ("device", 1), ("mindspeed", False, [])]
    assert sys.argv == ["trainer.main", "--config", "run.yaml"]


def test_npu_tells_mindspeed_how_the_ranks_are_cut(ascend: list[tuple[Any, ...]]) -> None:
    platform = select_platform("npu")
    platform.activate(1)
    platform.configure(FIGURES)
    name, arguments, argv = ascend[-1]
    assert (name, argv) == ("repatch", [])
    expected = {
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "sequence_parallel": True,
    }
    assert arguments.items() >= expected.items()
    assert platform.peak_flops("bfloat16") == 300e12


def test_npu_sets_its_environment_only_where_the_user_has_not(
    monkeypatch: pytest.MonkeyPatch, ascend: list[tuple[Any, ...]]
) -> None:
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "7")
    select_platform("npu").activate(1)
    assert os.environ["HCCL_CONNECT_TIMEOUT"] == "7"
    assert os.environ["TASK_QUEUE_ENABLE"] == "2"


@pytest.mark.parametrize(
    ("module", "fix"),
    [("torch_npu", "pip install torch==.*torch-npu=="), ("mindspeed.megatron_adaptor", "git clone -b")],
)
def test_npu_names_the_package_that_is_missing_and_what_to_type(
    monkeypatch: pytest.MonkeyPatch, ascend: list[tuple[Any, ...]], module: str, fix: str
) -> None:
    refuse(monkeypatch, module)
    with pytest.raises(DependencyError, match=f"{module} cannot be imported.*{fix}"):
        select_platform("npu").activate(1)


def test_npu_refuses_a_torch_npu_that_is_built_for_another_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ascend: list[tuple[Any, ...]]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    install(other, "torch-npu", "1.11.0")
    monkeypatch.syspath_prepend(other)
    with pytest.raises(DependencyError, match=r"torch-npu 1\.11\.0 is built for torch 1\.11\.0"):
        select_platform("npu").activate(1)


def test_npu_without_a_device_points_to_cann(monkeypatch: pytest.MonkeyPatch, ascend: list[tuple[Any, ...]]) -> None:
    monkeypatch.setattr(torch.npu, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"npu-smi info.*set_env\.sh"):
        select_platform("npu").activate(1)


def test_npu_refuses_a_mindspeed_that_cannot_be_told(
    monkeypatch: pytest.MonkeyPatch, ascend: list[tuple[Any, ...]]
) -> None:
    platform = select_platform("npu")
    platform.activate(1)
    monkeypatch.delattr(sys.modules["mindspeed.megatron_adaptor"], "repatch")
    with pytest.raises(DependencyError, match=r"repatch.*branch"):
        platform.configure(FIGURES)
