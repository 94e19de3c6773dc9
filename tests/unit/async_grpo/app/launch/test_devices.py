"""Accelerators are dealt out so that none belongs to two roles."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from async_grpo.app.cli.main import app
from async_grpo.app.launch.role_specs import assign_devices, check_machine, role_specs
from async_grpo.app.launch.run_folder import RunFolder
from async_grpo.config import RunConfig, validate
from async_grpo.errors import ConfigError, DependencyError
from trainer.platform import base, cpu, list_platforms


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
    [({"ASCEND_RT_VISIBLE_DEVICES": "0,1,2"}, None, "names 3"), ({}, 6, "has 6")],
)
def test_too_few_devices_are_refused_before_anything_starts(
    node: RunConfig, environment: dict[str, str], there: int | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=f"8 devices.*{words}"):
        assign_devices(node, environment, there)


def test_trainer_and_servers_that_share_see_the_same_devices_and_no_two_servers_do() -> None:
    one = {"CUDA_VISIBLE_DEVICES": "5"}
    assert assign_devices(shared(1, 1), one) == {"trainer": one, "rollout-0": one}
    seen = assign_devices(shared(4, 2, tensor_parallel=2), {}, available=4)
    assert {role: variables["CUDA_VISIBLE_DEVICES"] for role, variables in seen.items()} == {
        "trainer": "0,1,2,3",
        "rollout-0": "0,1",
        "rollout-1": "2,3",
    }
    with pytest.raises(ConfigError, match=r"3 devices.*has 2"):
        assign_devices(shared(1, 3), {}, available=2)


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
    roles = role_specs(node, RunFolder(tmp_path), tmp_path)
    assert roles.trainer.env["ASCEND_RT_VISIBLE_DEVICES"] == "0,1,2,3"
    assert roles.servers[1].env == {"ASCEND_RT_VISIBLE_DEVICES": "6,7"}


@pytest.mark.parametrize(
    ("platform", "words"),
    [
        ("cuda", "nvidia-smi.*/dev/nvidia"),
        ("npu", "npu-smi.*/dev/davinci"),
    ],
)
def test_a_run_on_devices_that_this_machine_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch, platform: str, words: str
) -> None:
    monkeypatch.setattr(base.Platform, "has_devices", lambda self: False)
    with pytest.raises(ConfigError, match=rf"trainer\.platform is {platform}.*{words}.*doctor --platform"):
        check_machine(run_config({"platform": platform}, {}))
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.platform is cuda"):
        check_machine(run_config({}, {"vllm": {"platform": "cuda"}}))


def test_a_run_is_refused_before_its_inputs_are_read_and_a_dry_run_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(base.Platform, "has_devices", lambda self: False)
    words = ["run", "qwen2.5_7b_gsm8k_cuda", "-o", f"runs_dir={tmp_path}", "-o", "model.path=nothing/here"]
    refused = CliRunner().invoke(app, words, env={"COLUMNS": "1000"})
    assert refused.exit_code == 1 and "ConfigError: trainer.platform is cuda" in refused.output
    planned = CliRunner().invoke(app, [*words, "--dry-run"], env={"COLUMNS": "1000"})
    assert planned.exit_code == 0 and "a start would be refused: trainer.platform is cuda" in planned.output


def test_devices_are_known_by_their_files_where_the_vendors_tool_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    (tmp_path / "davinci_manager").touch()
    assert [each.name for each in list_platforms() if each.has_devices(lambda words: None, tmp_path)] == ["cuda"]


def test_packages_that_are_missing_or_do_not_fit_are_named_with_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "installed", {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}.get)
    with pytest.raises(DependencyError, match=r"torchvision.*0\.28\.0.*async-grpo install cpu --only stand-ins"):
        check_machine(run_config({}, {}))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match=r"torch, megatron, vllm.*Run: async-grpo install cpu$"):
        check_machine(run_config({}, {}))
