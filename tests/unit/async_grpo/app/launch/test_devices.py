"""Accelerators are dealt out so that none belongs to two roles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_grpo.app.launch.role_specs import assign_devices, role_specs
from async_grpo.app.launch.run_folder import RunFolder
from async_grpo.config import RunConfig, validate
from async_grpo.errors import ConfigError


def run_config(trainer: dict[str, Any], rollout: dict[str, Any], **launch: str) -> RunConfig:
    raw = {"name": "deal", "model": {"path": "any"}, "trainer": trainer, "rollout": rollout, "launch": launch}
    return validate(raw, "test")


def shared(ranks: int, servers: int, tensor_parallel: int = 1) -> RunConfig:
    vllm = {"platform": "cuda", "tensor_parallel": tensor_parallel, "gpu_memory_utilization": 0.4}
    return run_config(
        {"platform": "cuda", "processes": ranks, "device_memory_share": 0.6},
        {"servers": servers, "vllm": {**vllm, "kv_cache_bytes": 1 << 30}},
        share_devices="split",
    )


@pytest.fixture
def node() -> RunConfig:
    """Four devices train, two servers of two generate."""
    trainer = {"platform": "npu", "processes": 4, "tensor_parallel": 4}
    return run_config(trainer, {"servers": 2, "vllm": {"platform": "ascend", "tensor_parallel": 2}})


def test_every_role_gets_devices_of_its_own_in_the_users_order(node: RunConfig) -> None:
    assert assign_devices(node, {}) == {
        "trainer": {"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3"},
        "rollout-0": {"ASCEND_RT_VISIBLE_DEVICES": "4,5"},
        "rollout-1": {"ASCEND_RT_VISIBLE_DEVICES": "6,7"},
    }
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


def test_trainer_and_servers_that_share_see_the_same_devices_and_no_two_servers_do() -> None:
    one = {"CUDA_VISIBLE_DEVICES": "5"}
    assert assign_devices(shared(1, 1), one) == {"trainer": one, "rollout-0": one}
    seen = assign_devices(shared(4, 2, tensor_parallel=2), {}, there=4)
    assert {role: variables["CUDA_VISIBLE_DEVICES"] for role, variables in seen.items()} == {
        "trainer": "0,1,2,3",
        "rollout-0": "0,1",
        "rollout-1": "2,3",
    }
    with pytest.raises(ConfigError, match="make 3 devices, but this machine has 2"):
        assign_devices(shared(1, 3), {}, there=2)


def test_a_role_on_the_cpu_sees_no_device_and_a_run_on_the_cpu_is_dealt_nothing() -> None:
    mixed = run_config({}, {"vllm": {"platform": "cuda"}})
    assert assign_devices(mixed, {}) == {
        "trainer": {"CUDA_VISIBLE_DEVICES": ""},
        "rollout-0": {"CUDA_VISIBLE_DEVICES": "0"},
    }
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
