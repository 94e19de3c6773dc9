"""What every platform promises: the CPU as it is, CUDA and NPU with imitated tools, torch and packages."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from async_grpo.config import validate
from async_grpo.config.rollout import VllmConfig
from async_grpo.config.trainer import PlatformName, TrainerConfig
from async_grpo.errors import ConfigError
from async_grpo.models.shapes import SHAPES
from async_grpo.utils.network import card_environment
from async_grpo.utils.text import gib
from tests.support.imitated_devices import NPU, NVIDIA, TWO_CHIPS, Event, imitate_devices, says
from trainer.platform import Platform, list_platforms, select_platform
from trainer.platform.base import Device, LayerRole, smallest_device_gib, visible_devices

NAMES: tuple[str, ...] = get_args(PlatformName)
WITHOUT_TORCH = """
import sys
from trainer.platform import base, list_platforms, probes
base.TOOL_TIMEOUT_S = 0.0
for platform in list_platforms():
    assert platform.list_devices() == []
    findings = [check() for check in platform.probes() if check is not probes.check_private_names]
    assert all(finding.name and (finding.ok or finding.fix) for finding in findings)
assert not {"torch", "megatron", "transformers"} & sys.modules.keys()
"""


@pytest.fixture(params=NAMES)
def platform(request: pytest.FixtureRequest) -> Platform:
    return select_platform(request.param)


@pytest.fixture(params=[name for name in NAMES if name != "cpu"])
def accelerator(request: pytest.FixtureRequest) -> Platform:
    return select_platform(request.param)


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    return imitate_devices(tmp_path, monkeypatch)


def test_the_configuration_names_every_platform_and_no_name_stands_for_two() -> None:
    assert tuple(platform.name for platform in list_platforms()) == NAMES
    names = [name for platform in list_platforms() for name in (platform.name, *platform.aliases)]
    assert len(names) == len(set(names))
    for name in (*names, *get_args(VllmConfig.model_fields["platform"].annotation)):
        found = select_platform(name)
        assert name in (found.name, *found.aliases)


def test_an_unknown_platform_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'abacus'.*cpu.*cuda.*npu"):
        select_platform("abacus")


def test_platforms_answer_the_doctor_and_the_launcher_without_torch() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True)


def test_only_accelerators_have_devices_to_share_out(platform: Platform) -> None:
    assert "gloo" in platform.backend.removeprefix("cpu:").split(",")
    assert bool(platform.visible_variable) is bool(platform.tool) is (platform.device != "cpu")
    variables = card_environment("127.0.0.1", platform.network_variables)
    assert variables == {"GLOO_SOCKET_IFNAME": "lo"} | dict.fromkeys(platform.network_variables, "=lo")


def test_a_variable_that_says_nothing_differs_from_one_that_hides_everything(accelerator: Platform) -> None:
    variable = accelerator.visible_variable
    assert visible_devices(accelerator, {}) is None
    assert visible_devices(accelerator, {variable: ""}) == []
    assert visible_devices(accelerator, {variable: "4, 5"}) == ["4", "5"]


@pytest.mark.parametrize(
    ("name", "text", "devices"),
    [
        (
            "cuda",
            NVIDIA,
            [
                Device(0, "NVIDIA H100 80GB HBM3", 81559 / 1024, "550.54.15"),
                Device(1, "NVIDIA L4", 23034 / 1024, "550.54.15"),
            ],
        ),
        (
            "npu",
            NPU,
            [Device(0, "Ascend910B2", 64.0, "25.2.0"), Device(1, "Ascend910B2", 64.0, "25.2.0", health="Alarm")],
        ),
        ("npu", TWO_CHIPS, [Device(index, "AscendAscend910", 64.0, "25.2.0") for index in (0, 1)]),
        ("cpu", NVIDIA, []),
    ],
)
def test_devices_are_those_that_the_tool_lists(name: str, text: str, devices: list[Device]) -> None:
    platform = select_platform(name)
    assert platform.list_devices(says(text)) == devices
    smallest = min((device.memory_gib for device in devices), default=None)
    assert smallest_device_gib(platform, says(text)) == smallest


@pytest.mark.parametrize("text", [None, "", "NVIDIA-SMI has failed because it couldn't communicate", "1, 2, 3\n,,,\n"])
def test_a_tool_that_is_not_there_or_fails_lists_nothing(platform: Platform, text: str | None) -> None:
    assert platform.list_devices(says(text)) == []
    assert smallest_device_gib(platform, says(text)) is None


@pytest.mark.parametrize("ranks", [{}, {"processes": 4, "pipeline_parallel": 2}])
def test_the_memory_plan_of_a_device_is_the_sum_that_its_text_shows(platform: Platform, ranks: dict[str, int]) -> None:
    config = validate({"name": "a", "model": {"path": "any"}, "trainer": {"platform": platform.name, **ranks}}, "test")
    plan = platform.memory_plan(config, SHAPES["qwen2.5-0.5b"])
    assert (plan is None) is (platform.device == "cpu")
    if plan is None:
        return
    total, *parts, reserved = (float(figure) for figure in re.findall(r"(?<=[ (])[\d.]+(?=[ )]|$)|^[\d.]+", str(plan)))
    factor, *tensors = parts
    assert f"{total}" == gib(plan.total) and min(tensors) > 0
    assert factor * sum(tensors) + reserved == pytest.approx(total, abs=0.3)


@pytest.mark.usefixtures("events")
def test_replaced_layers_are_classes_by_role(platform: Platform) -> None:
    sizes = {"num_moe_experts": 4, "hidden_size": 64, "moe_ffn_hidden_size": 32}
    config = SimpleNamespace(context_parallel_size=1, params_dtype=torch.bfloat16, **sizes)
    for role, layer in platform.layer_replacements(config).items():
        assert role in LayerRole and isinstance(layer, type)


def test_memory_in_use_is_at_most_the_peak_and_that_the_whole(platform: Platform, events: list[Event]) -> None:
    platform.reset_peak_memory()
    platform.synchronize()
    use = platform.memory_use()
    assert 0 < use.used_bytes <= use.total_bytes
    assert 1 << 20 < use.peak_bytes <= use.total_bytes
    assert events == ([] if platform.device == "cpu" else [("reset",), ("synchronize",)])


def test_another_megatron_is_refused(platform: Platform, events: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: platform.name == "cuda")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.17.0")
    with pytest.raises(ConfigError, match=r"megatron-core.*async-grpo install"):
        platform.activate(TrainerConfig())
    assert events == []


def test_a_rank_takes_the_device_of_its_number_and_leaves_the_users_environment(
    accelerator: Platform, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = TrainerConfig(processes=2, tensor_parallel=2)
    defaults = accelerator.rank_environment(layout)
    first, *others = defaults
    monkeypatch.setenv(first, "mine")
    monkeypatch.setenv("LOCAL_RANK", "1")
    accelerator.activate(layout)
    assert [event for event in events if event[0] == "device"] == [("device", 1)]
    assert os.environ[first] == "mine"
    assert others
    assert {name: os.environ[name] for name in others}.items() <= defaults.items()


def test_copies_in_the_background_have_a_stream_of_their_own_on_every_accelerator(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued = SimpleNamespace(Stream=lambda: "queued with the training's operators", SyncLaunchStream=lambda: "launched")
    monkeypatch.setattr(torch, "npu", queued, raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "on a queue of the device")
    expected = {"cpu": None, "cuda": "on a queue of the device", "npu": "launched"}
    assert platform.background_stream() == expected[platform.name]


def test_the_allocator_of_a_rank_gets_its_share_less_what_is_reserved_for_the_rest(
    accelerator: Platform, events: list[Event]
) -> None:
    accelerator.activate(TrainerConfig())
    assert not [event for event in events if event[0] == "share"]
    accelerator.activate(TrainerConfig(platform=accelerator.name, device_memory_share=0.5))
    assert ("share", 0.5 - 3 / 64, 0) in events  # 3 of the 64 GiB are context, workspaces and collectives


def test_a_rank_without_a_device_of_its_own_is_refused(
    accelerator: Platform, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=f"rank 2.* 2 .*visible.*{accelerator.visible_variable}"):
        accelerator.activate(TrainerConfig())
    assert ("device", 2) not in events


@pytest.mark.usefixtures("events")
def test_a_machine_where_torch_sees_no_device_is_refused_with_what_to_look_at(
    accelerator: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(getattr(torch, accelerator.device), "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"{accelerator.tool}.*{accelerator.visible_variable}.*platform to cpu"):
        accelerator.activate(TrainerConfig())


@pytest.mark.usefixtures("events")
def test_peak_flops_are_those_of_the_configuration_else_of_the_vendor(platform: Platform) -> None:
    stated = {"cuda": 989e12}.get(platform.name)
    assert platform.peak_flops("bfloat16") == stated
    if platform.device != "cpu":
        platform.activate(TrainerConfig.model_validate({"platform": platform.name, "device_peak_tflops": 400}))
        assert platform.peak_flops("bfloat16") == 400e12
