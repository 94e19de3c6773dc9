"""The shipped configurations for accelerators can be planned anywhere, and are rejected where they cannot fit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from async_grpo.app.cli.main import app
from async_grpo.app.launch import plan as run_plan
from async_grpo.app.launch.memory_plan import plan_devices
from async_grpo.config import RunConfig, load
from async_grpo.utils.text import GIB
from trainer.platform import base

CONFIGS = Path(__file__).parents[4] / "configs"
NODES = [
    f"{model}_{task}_{platform}"
    for model, tasks in {
        "qwen2.5_7b": ("gsm8k", "deepscaler"),
        "qwen2.5_32b": ("deepscaler",),
        "qwen3_30b_a3b": ("deepscaler",),
    }.items()
    for task in tasks
    for platform in ("ascend", "cuda")
]
ONE_DEVICE = [f"qwen2.5_{size}_gsm8k_one_{device}" for size in ("0.5b", "1.5b") for device in ("gpu", "npu")]
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}


@pytest.fixture(autouse=True)
def _run_in_an_empty_folder_without_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine whose vendor tools list no device."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(base, "TOOL_TIMEOUT_S", 0.0)


def plan(name: str, *overrides: str) -> Result:
    words = [word for override in overrides for word in ("-o", override)]
    return CliRunner().invoke(app, ["run", str(CONFIGS / f"{name}.yaml"), "--dry-run", *words], env={"COLUMNS": "400"})


def read(name: str) -> RunConfig:
    return load(CONFIGS / f"{name}.yaml")


@pytest.mark.parametrize("name", NODES)
def test_a_dry_run_needs_neither_devices_nor_files_and_lists_missing_ones(name: str) -> None:
    result = plan(name)
    assert result.exit_code == 0, result.output
    labels = ("trainer device", "engine device", "stay free", "rollout-0", "not here yet", "model.path", "data.path")
    assert all(words in result.output for words in labels), result.output
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize("name", ONE_DEVICE)
def test_one_device_is_enough_to_start(name: str) -> None:
    result = plan(name)
    assert result.exit_code == 0, result.output
    assert "trainer: 0; rollout-0: 0" in result.output
    device_gib = 22 if "gpu" in name else 60
    [row] = [line for line in result.output.splitlines() if "shared device" in line]
    assert re.findall(r"of (\d+) GiB", row) == [f"{device_gib}"]
    sums = [float(figure) for figure in re.findall(r"= ([\d.]+) GiB", row)]
    assert len(sums) == (2 if read(name).launch.share_devices == "sleep" else 1)
    assert all(0.7 * device_gib < figure <= device_gib for figure in sums)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.device_memory_share=0.69"], "trainer.device_memory_share (0.69)"),
        (["rollout.vllm.kv_cache_bytes=null"], "rollout.vllm.kv_cache_bytes is not set"),
        (
            ["trainer={platform: cuda, nodes: 2, processes: 2, rendezvous: {address: a}}"],
            "trainer.nodes is 2",
        ),
        (["trainer={platform: cpu}"], "trainer.platform is cpu"),
        (["trainer.device_memory_share=0.5"], "a rank may take 0.5"),
    ],
)
def test_conflicts_of_a_shared_device_are_rejected(overrides: list[str], words: str) -> None:
    result = plan("qwen2.5_0.5b_gsm8k_one_gpu", *overrides)
    assert result.exit_code == 1
    assert words in result.output, result.output


def test_streaming_is_rejected_with_sleeping_engines() -> None:
    result = plan("qwen2.5_1.5b_gsm8k_one_gpu", "trainer.streaming=true")
    assert "launch.share_devices is sleep" in result.output and "trainer.streaming" in result.output


@pytest.mark.parametrize("name", NODES)
def test_node_configs_use_all_devices(name: str) -> None:
    config = read(name)
    used = config.trainer.processes + config.rollout.servers * config.rollout.vllm.tensor_parallel
    assert used == (16 if name.endswith("ascend") else 8)


def test_the_plan_of_two_nodes_matches_the_documented_commands() -> None:
    output = plan("qwen2.5_32b_deepscaler_ascend_two_nodes").output
    for node, servers in enumerate((("rollout-0", "rollout-1"), ("rollout-2", "rollout-3"))):
        devices = f"trainer: 0,1,2,3,4,5,6,7; {servers[0]}: 8,9,10,11; {servers[1]}: 12,13,14,15"
        assert re.search(rf"devices, node {node} +│ {devices} ", output), output
    recipe = (CONFIGS.parent / "docs/several-machines.md").read_text()
    commands = re.findall(r"ASCEND_RT_VISIBLE_DEVICES=[\d,]+ async-grpo \w+ CONFIG --[\w-]+ [\w-]+", output)
    assert len(commands) == 6
    for command in commands:
        assert command.replace("CONFIG", "run.yaml") in recipe
    assert "set before" not in output


ON_DEVICES = sorted(path.stem for path in CONFIGS.glob("qwen*.yaml"))


@pytest.mark.parametrize("name", ON_DEVICES)
def test_shipped_layouts_fit_and_need_their_pipeline_stages(name: str) -> None:
    shipped = plan_devices(read(name))
    assert shipped is not None and shipped.trainer_gib is not None and shipped.engine_gib is not None
    shipped.check()
    if read(name).trainer.pipeline_parallel > 1:
        one_stage = plan_devices(load(CONFIGS / f"{name}.yaml", ["trainer.pipeline_parallel=1"]))
        assert one_stage is not None and one_stage.trainer is not None
        assert one_stage.trainer.total > shipped.trainer_gib * GIB


def test_configs_of_one_model_differ_only_in_their_task() -> None:
    gsm8k, deepscaler = (read(f"qwen2.5_7b_{task}_cuda").model_dump() for task in ("gsm8k", "deepscaler"))
    different = {key for key in gsm8k if gsm8k[key] != deepscaler[key]}
    assert different == {"name", "steps", "data", "rewards", "sampling", "rollout"}
    assert gsm8k["trainer"] == deepscaler["trainer"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("trainer.device_memory_gib=24",), ["has 24 GiB", "optimizer 21.3", "trainer.tensor_parallel"]),
        (("rollout.vllm.device_memory_gib=16",), ["has 16 GiB", "weights 14.2", "rollout.vllm.tensor_parallel"]),
        (("model.architecture=null", "model.path=models/none"), ["config.json"]),
        (("model.architecture=gpt-2",), ["Known: qwen2.5-0.5b"]),
        (("trainer.platform=cpu",), ["device_memory_gib"]),
        (("rollout.vllm.platform=cpu",), ["gpu_memory_utilization", "rollout.vllm.platform"]),
    ],
)
def test_layouts_that_do_not_fit_are_rejected_with_their_arithmetic(overrides: list[str], words: list[str]) -> None:
    result = plan("qwen2.5_7b_gsm8k_cuda", *overrides)
    assert result.exit_code == 1
    assert all(word in result.output for word in words), result.output


def test_the_plan_marks_devices_of_unknown_size() -> None:
    keys = ("trainer.device_memory_gib=null", "rollout.vllm.device_memory_gib=null")
    result = plan("qwen2.5_7b_gsm8k_cuda", *keys)
    assert result.exit_code == 0
    assert "not known (trainer.device_memory_gib)" in result.output


def test_a_run_needs_the_model_files_even_with_an_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_plan, "check_machine", lambda _: None)  # as on a machine with the devices
    words = ["run", str(CONFIGS / "qwen2.5_7b_gsm8k_cuda.yaml"), "-o", "model.path=models/Qwen2.5-7B"]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "400"})
    assert result.exit_code == 1
    assert "models/Qwen2.5-7B does not exist" in result.output


def test_shape_is_read_from_config_json_if_present() -> None:
    folder = Path("Qwen/Qwen2.5-7B")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    assert "trainer device" in plan("qwen2.5_7b_gsm8k_cuda").output
    (folder / "config.json").write_text(json.dumps(QWEN_7B | {"num_hidden_layers": 48}))
    result = plan("qwen2.5_7b_gsm8k_cuda")
    assert result.exit_code == 1
    assert "is another model" in result.output
