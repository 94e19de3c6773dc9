"""What a dry run says of devices and machines."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from async_grpo.app.launch.node_plan import explain_excess_devices, placement_rows, plan_nodes
from async_grpo.app.launch.plan import RunPlan
from async_grpo.app.launch.plan_table import plan_table
from async_grpo.config import RunConfig, validate
from async_grpo.errors import ConfigError


def npus(processes: int, servers: int, *, nodes: int = 1, width: int = 4, **launch: Any) -> RunConfig:
    return validate(raw_npus(processes, servers, nodes, width) | {"launch": launch}, "test")


def raw_npus(processes: int, servers: int, nodes: int = 1, width: int = 4, **vllm: Any) -> dict[str, Any]:
    return {
        "name": "nodes",
        "model": {"random": {}},
        "trainer": {"platform": "npu", "processes": processes, "nodes": nodes, "rendezvous": {"address": "10.0.0.5"}},
        "rollout": {"servers": servers, "vllm": {"platform": "ascend", "tensor_parallel": width, **vllm}},
    }


def printed(config: RunConfig, width: int) -> str:
    """The table of a dry run in a terminal of that width."""
    console = Console(width=width, record=True, file=StringIO())
    console.print(plan_table(RunPlan(config, config)))
    return console.export_text()


def test_more_devices_than_a_node_has_are_reported_with_the_machines_that_they_take() -> None:
    too_many = npus(16, 1, width=2)
    assert explain_excess_devices(too_many).startswith("18 devices are planned, but a node has 16")
    rows = dict(placement_rows(too_many))
    assert "too many devices" in rows
    assert rows["devices, node 1"] == "rollout-0: 0,1"
    assert rows["type on node 1"].startswith("ASCEND_RT_VISIBLE_DEVICES=0,1 async-grpo rollout CONFIG --name rollout-0")


def test_a_run_that_fits_on_its_node_is_not_reported() -> None:
    assert not explain_excess_devices(npus(8, 2))
    assert not explain_excess_devices(npus(16, 1, width=2, devices_per_node=18))
    assert dict(placement_rows(npus(8, 2))) == {
        "devices": "trainer: 0,1,2,3,4,5,6,7; rollout-0: 8,9,10,11; rollout-1: 12,13,14,15"
    }


def test_servers_take_what_a_trainer_of_two_nodes_leaves_and_no_server_is_on_two() -> None:
    first, second, third = plan_nodes(npus(24, 3, nodes=2, width=4, devices_per_node=16))
    assert first.roles == {"trainer": [*map(str, range(12))], "rollout-0": ["12", "13", "14", "15"]}
    assert second.roles["rollout-1"] == ["12", "13", "14", "15"]
    assert third.roles == {"rollout-2": ["0", "1", "2", "3"]}
    assert second.commands == [
        "ASCEND_RT_VISIBLE_DEVICES=0,1,2,3,4,5,6,7,8,9,10,11 async-grpo trainer CONFIG --node-rank 1",
        "ASCEND_RT_VISIBLE_DEVICES=12,13,14,15 async-grpo rollout CONFIG --name rollout-1",
    ]


def test_a_role_that_fits_on_no_node_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"launch\.devices_per_node"):
        plan_nodes(npus(40, 1, nodes=2))


def test_commands_are_printed_whole_in_a_narrow_terminal() -> None:
    lines = printed(npus(24, 1, nodes=2), 60).splitlines()
    joined = "".join(line.strip("│ ").split("│")[-1].strip() for line in lines)
    assert "ASCEND_RT_VISIBLE_DEVICES=0,1,2,3,4,5,6,7,8,9,10,11" in joined


def test_a_run_on_several_machines_names_what_its_roles_cannot_reach() -> None:
    raw = raw_npus(24, 1, nodes=2)
    assert "redis.url is not set" in dict(placement_rows(validate(raw, "test")))["set before"]
    raw |= {"redis": {"url": "redis://10.0.0.5:6379"}, "weights": {"bind": "tcp://10.0.0.5:5600", "encrypt": "control"}}
    assert "set before" not in dict(placement_rows(validate(raw, "test")))


def test_an_engine_without_captured_graphs_is_mentioned() -> None:
    assert "without captured graphs (enforce_eager)" in printed(
        validate(raw_npus(8, 1, enforce_eager=True), "test"), 200
    )
    assert "enforce_eager" not in printed(npus(8, 1), 200)
