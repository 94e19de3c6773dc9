"""Accelerators are read off the vendors' tools, and dealt out so that none belongs to two roles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_grpo.app.launch.role_specs import assign_devices, role_specs
from async_grpo.app.launch.run_folder import RunFolder
from async_grpo.config import RunConfig, validate
from async_grpo.errors import ConfigError
from tests.support.smi import NPU, NVIDIA, TWO_CHIPS, says
from trainer.platform import select_platform
from trainer.platform.base import Device, run_tool, smallest_memory_gib, visible


def run_config(trainer: dict[str, Any], rollout: dict[str, Any]) -> RunConfig:
    return validate({"name": "deal", "model": {"path": "any"}, "trainer": trainer, "rollout": rollout}, "test")


@pytest.fixture
def node() -> RunConfig:
    """Four devices train, two servers of two generate."""
    trainer = {"platform": "npu", "processes": 4, "tensor_parallel": 4}
    return run_config(trainer, {"servers": 2, "vllm": {"platform": "ascend", "tensor_parallel": 2}})


def test_nvidia_smi_lists_a_gpu_a_line() -> None:
    first, second = select_platform("cuda").devices(says(NVIDIA))
    assert first == Device(0, "NVIDIA H100 80GB HBM3", 81559 / 1024, "550.54.15")
    assert second.name == "NVIDIA L4"


def test_npu_smi_lists_an_npu_in_two_lines() -> None:
    first, second = select_platform("npu").devices(says(NPU))
    assert first == Device(0, "Ascend910B2", 64.0, "25.2.0")
    assert (second.index, second.health) == (1, "Alarm")


def test_an_npu_of_two_chips_counts_as_two_devices() -> None:
    assert [device.memory_gib for device in select_platform("npu").devices(says(TWO_CHIPS))] == [64.0, 64.0]


@pytest.mark.parametrize("text", [None, "", "NVIDIA-SMI has failed because it couldn't communicate", "1, 2, 3\n,,,\n"])
@pytest.mark.parametrize("platform", ["cuda", "npu", "cpu"])
def test_a_tool_that_is_not_there_or_fails_lists_nothing(platform: str, text: str | None) -> None:
    assert select_platform(platform).devices(says(text)) == []
    assert smallest_memory_gib(select_platform(platform), says(text)) is None


def test_the_smallest_device_decides() -> None:
    assert smallest_memory_gib(select_platform("cuda"), says(NVIDIA)) == 23034 / 1024


def test_a_tool_that_is_not_installed_or_fails_is_no_error() -> None:
    assert run_tool(["no-such-tool-anywhere"]) is None
    assert run_tool(["false"]) is None
    assert run_tool(["echo", "here"]) == "here\n"


def test_an_environment_that_says_nothing_differs_from_one_that_hides_everything() -> None:
    assert visible(select_platform("cuda"), {}) is None
    assert visible(select_platform("cuda"), {"CUDA_VISIBLE_DEVICES": ""}) == []
    assert visible(select_platform("npu"), {"ASCEND_RT_VISIBLE_DEVICES": "4, 5"}) == ["4", "5"]


def test_every_role_gets_devices_of_its_own(node: RunConfig) -> None:
    assert assign_devices(node, {}) == {
        "trainer": {"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3"},
        "rollout-0": {"ASCEND_RT_VISIBLE_DEVICES": "4,5"},
        "rollout-1": {"ASCEND_RT_VISIBLE_DEVICES": "6,7"},
    }


def test_the_users_choice_of_devices_is_dealt_out_in_its_order(node: RunConfig) -> None:
    dealt = assign_devices(node, {"ASCEND_RT_VISIBLE_DEVICES": "15,14,13,12,11,10,9,8"})
    assert dealt["rollout-1"] == {"ASCEND_RT_VISIBLE_DEVICES": "9,8"}


@pytest.mark.parametrize(
    ("environment", "there", "words"),
    [({"ASCEND_RT_VISIBLE_DEVICES": "0,1,2"}, None, "names 3"), ({}, 6, "this machine has 6")],
)
def test_too_few_devices_are_refused_before_anything_starts(
    node: RunConfig, environment: dict[str, str], there: int | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=f"make 8 devices, but .*{words}"):
        assign_devices(node, environment, there)


def test_a_role_on_the_cpu_sees_no_device() -> None:
    mixed = run_config({}, {"vllm": {"platform": "cuda"}})
    assert assign_devices(mixed, {}) == {
        "trainer": {"CUDA_VISIBLE_DEVICES": ""},
        "rollout-0": {"CUDA_VISIBLE_DEVICES": "0"},
    }


def test_a_run_on_the_cpu_is_dealt_nothing() -> None:
    assert assign_devices(run_config({}, {}), {"CUDA_VISIBLE_DEVICES": "0"}) == {"trainer": {}, "rollout-0": {}}


def test_one_machine_has_accelerators_of_one_kind() -> None:
    with pytest.raises(ConfigError, match=r"npu and rollout\.vllm\.platform cuda"):
        assign_devices(run_config({"platform": "npu"}, {"vllm": {"platform": "cuda"}}), {})


def test_the_roles_are_started_with_their_devices(
    node: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    specs = {spec.name: spec.env for spec in role_specs(node, RunFolder(tmp_path), tmp_path)}
    assert specs["trainer"]["ASCEND_RT_VISIBLE_DEVICES"] == "0,1,2,3"
    assert specs["rollout-1"] == {"ASCEND_RT_VISIBLE_DEVICES": "6,7"}
