"""Published configurations of other systems, imported: each value against a longhand expectation."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from async_grpo.app.cli.import_config import SourceName
from async_grpo.app.cli.main import app
from async_grpo.app.launch.role_specs import assign_devices
from async_grpo.config import RunConfig
from async_grpo.config.load import dotted_keys
from async_grpo.errors import ConfigError
from async_grpo.lab.importers import SOURCES, insert_tables, page_name
from async_grpo.lab.importers.conversions import CONVERSIONS
from async_grpo.lab.importers.reading import flatten, read_keys
from async_grpo.lab.importers.table import SourceSystem
from async_grpo.lab.importers.translation import Imported, import_file

ROOT = Path(__file__).parents[5]
PUBLISHED = ROOT / "tests/support/published"

# Of each file (its first line has the link): the source, what --set says, and what the result must say.
CASES: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "verl_grpo_qwen3_0.6b.sh": (
        "verl",
        {},
        {
            "steps": 1,
            "max_staleness": 0,
            "groups_per_step": 16,  # train_batch_size counts prompts
            "group_size": 2,
            "trainer.mini_batches": 2,  # 16 / ppo_mini_batch_size 8
            "sampling.max_tokens": 128,
            "data.max_prompt_tokens": 512,
            "trainer.optimizer.lr": 5e-7,
            "trainer.optimizer.beta2": 0.999,  # verl's default
            "trainer.optimizer.weight_decay": 0.01,  # verl's default
            "trainer.objective.loss": "ppo_clip",
            "trainer.objective.prox": "recompute",
            "trainer.objective.aggregation": "token_mean",
            "trainer.objective.dual_clip": 3.0,  # verl's default clip_ratio_c
            "trainer.objective.kl_beta": 0.001,
            "trainer.objective.kl_estimator": "k3",  # low_var_kl
            "trainer.objective.kl_in": "loss",
            "trainer.reference.source": "frozen",
            "trainer.tensor_parallel": 2,
            "trainer.pipeline_parallel": 2,
            "trainer.processes": 4,  # half of 8 devices
            "rollout.servers": 2,  # the other half, two devices each
            "rollout.vllm.tensor_parallel": 2,
        },
    ),
    "verl_fully_async_dapo_7b.sh": (
        "verl",
        {},
        {
            "groups_per_step": 512,  # ppo_mini_batch_size 32 * require_batches 4 * trigger_parameter_sync_step 4
            "trainer.mini_batches": 16,
            "max_staleness": 1,  # staleness_threshold 0.1, rounded up
            "steps": 100,  # 51200 prompts / 512
            "group_size": 16,
            "rollout.interruption": "recompute",
            "sampling.max_tokens": 8192,
            "trainer.micro_batch_tokens": 20480,
            "trainer.objective.prox": "behaviour",  # the recipe's bypass_mode
            "trainer.objective.clip_low": 0.2,
            "trainer.objective.clip_high": 0.28,
            "trainer.objective.dual_clip": 10.0,
            "trainer.optimizer.warmup_steps": 10,
            "trainer.nodes": 2,
            "trainer.processes": 12,
            "rewards.overlong": "soft",
            "rewards.soft_overlong_tokens": 4096,
            "telemetry.trackers": ["tensorboard"],
        },
    ),
    "mindspeed_rl_grpo_qwen25_7b.yaml": (
        "mindspeed-rl",
        {},
        {
            "groups_per_step": 32,  # global_batch_size counts prompts
            "group_size": 8,
            "steps": 500,
            "seed": 1,
            "model.path": "./Qwen2.5-7B",
            "model.architecture": "qwen2.5-7b",
            "trainer.platform": "npu",
            "rollout.vllm.platform": "ascend",
            "trainer.processes": 8,
            "rollout.servers": 8,
            "trainer.tensor_parallel": 2,
            "trainer.pipeline_parallel": 2,
            "trainer.micro_batch_tokens": 16384,  # 4 samples of 2048 + 2048 tokens
            "trainer.objective.kl_beta": 0.001,
            "trainer.objective.clip_high": 0.2,
            "trainer.optimizer.schedule": "constant",
            "rewards.functions": [{"name": "math_17k_acc", "weight": 1.0}],
            "trainer.checkpoint.every_steps": 100,
        },
    ),
    "mindspeed_rl_dapo_qwen3_30b.yaml": (
        "mindspeed-rl",
        {},
        {
            "trainer.expert_parallel": 2,
            "trainer.objective.clip_low": 0.2,
            "trainer.objective.clip_high": 0.28,  # clip_higher_enable
            "rollout.dynamic_sampling": True,
            "rewards.overlong": "soft",
            "rewards.soft_overlong_tokens": 512,
            "rewards.soft_overlong_factor": 0.1,
            "rewards.functions": [{"name": "acc_for_dapo", "weight": 1.0}],
            "rollout.vllm.extra.enable_expert_parallel": True,
            "data.shuffle": False,
        },
    ),
    "mindrlhf_qwen2.5_7b.yaml": (
        "mindrlhf",
        {"rl_config.tokenizer_dir": "models/Qwen2.5-7B"},
        {
            "groups_per_step": 8,  # chunk_size 1 * num_rollouts 4 * data_parallel 2
            "group_size": 8,
            "trainer.mini_batches": 8,  # 64 samples / (1 * 1 * 2): 32 updates, at most one a group
            "trainer.objective.kl_beta": 0.01,
            "trainer.objective.aggregation": None,  # of the preset: seq_mean_token_mean
            "trainer.optimizer.schedule": "cosine",
            "trainer.optimizer.min_lr": 4.996843023e-07,  # 3,200 of 200,000 updates; there it falls to 1e-10
            "trainer.optimizer.warmup_steps": 1,  # 10 of 32 updates a step
            "trainer.tensor_parallel": 4,
            "trainer.processes": 8,
            "trainer.recompute": "full",
            "rollout.servers": 2,
            "rollout.vllm.tensor_parallel": 4,
            "sampling.temperature": 0.8,
            "rewards.functions": [
                {"name": "qwen_accuracy_reward", "weight": 1.0},  # accuracy_reward with model_name qwen2.5
                {"name": "format_reward", "weight": 1.0},
            ],
        },
    ),
    "mindrlhf_deepseekv3.yaml": (
        "mindrlhf",
        {},
        {
            "groups_per_step": 16,
            "trainer.processes": 512,
            "trainer.expert_parallel": 32,
            "sampling.temperature": 0.3,
            "sampling.max_tokens": 1024,
        },
    ),
    "trl_open_r1_distill.yaml": (
        "trl",
        {"num_processes": "7"},
        {
            "groups_per_step": 28,  # 16 * 7 * 4 completions / 16
            "group_size": 16,
            "trainer.mini_batches": None,  # one update a round of generation
            "trainer.optimizer.schedule": "cosine",
            "trainer.optimizer.min_lr": 1e-7,  # min_lr_rate 0.1
            "sampling.temperature": 0.7,
            "sampling.max_tokens": 2048,
            "trainer.objective.aggregation": "token_mean",  # TRL's default loss_type dapo
            "telemetry.trackers": ["wandb"],
        },
    ),
    "trl_open_r1_code.yaml": (
        "trl",
        {"num_processes": "7"},
        {
            "groups_per_step": 32,  # 16 * 7 * 4 completions / 14
            "steps": 500,
            "trainer.optimizer.warmup_steps": 15,  # 0.03 of 500
            "trainer.objective.kl_beta": 0.01,
            "rewards.functions": [{"name": "format", "weight": 0.1}],  # `code` is listed
            "trainer.checkpoint.every_steps": 50,
        },
    ),
}


def imported(name: str) -> Imported:
    source, given, _ = CASES[name]
    return import_file(SOURCES[source], PUBLISHED / name, given)


@pytest.mark.parametrize("name", CASES)
def test_a_published_file_becomes_these_values(name: str) -> None:
    found = {setting.key: setting.value for setting in imported(name).settings}
    assert {key: found.get(key) for key in CASES[name][2]} == CASES[name][2]


@pytest.mark.parametrize("name", CASES)
def test_nothing_of_a_published_file_is_dropped_silently(name: str) -> None:
    result = imported(name)
    source = SOURCES[CASES[name][0]]
    given = read_keys(source, PUBLISHED / name, {})
    rows = {row.theirs: row for row in source.rows}
    listed = Counter(item.key for item in result.keys)
    assert all(listed[key] == 1 for key, value in given.values.items() if value is not None)
    for item in result.keys:
        row = rows.get(item.key)
        assert item.reason or (item.outcome == "same" and row is not None and row.ours), item.key
    assert "does not know" not in " ".join(item.reason for item in result.left_out)


def type_in(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


@pytest.mark.parametrize("name", CASES)
def test_the_written_file_passes_a_dry_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source, given, _ = CASES[name]
    words = [word for pair in given.items() for word in ("--set", "=".join(pair))]
    result = type_in("import-config", str(PUBLISHED / name), "--from", source, "-o", "run.yaml", *words)
    assert result.exit_code == 0, result.output
    assert re.search(r"\d+ keys of the file: \d+ same, \d+ approximated, \d+ not supported\.\n$", result.stderr)
    # Verifiers that do algebra are tried in a process of their own, which takes seconds; another test does that.
    overrides = ["-o", "model.architecture=qwen3-30b-a3b", "-o", "rewards.functions=[{name: format}]"]
    result = type_in("run", "run.yaml", "--dry-run", *overrides)
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(Path("run.yaml").read_text())["rewards"]["functions"]


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


SCRIPT = """\
set -x
mini=${MINI:-8}
batch=$((mini * 2))   # arithmetic
DATA=(
    data.train_batch_size=${batch}
    data.max_prompt_length=$(( batch * 4 ))
)
if [ "$1" = long ]; then
    temperature=0.5
fi
MORE="
    trainer.device=npu \\
    trainer.nnodes=${3:-2}
"
case "$2" in
    *) DATA+=(data.seed=7) ;;
esac
echo "$(rm -rf /nowhere)" > /dev/null
"${LAUNCH[@]}" -m verl.trainer.main_ppo "${DATA[@]}" \\
    actor_rollout_ref.actor.ppo_mini_batch_size=$mini \\
    +actor_rollout_ref.rollout.temperature=${temperature} \\
    trainer.experiment_name=run-$(date) $MORE trainer.total_training_steps=3 "$@" 2>&1 | tee log.txt
"""


def test_a_launch_script_is_read_and_what_it_decides_is_listed(tmp_path: Path) -> None:
    file = write(tmp_path, "run.sh", SCRIPT)
    given = read_keys(SOURCES["verl"], file, {})
    assert given.values["data.train_batch_size"] == 16
    assert given.values["data.max_prompt_length"] == 64
    assert given.values["trainer.total_training_steps"] == 3
    assert (given.values["trainer.device"], given.values["trainer.nnodes"]) == ("npu", 2)
    assert "actor_rollout_ref.rollout.temperature" not in given.values
    [unknown] = [item for item in given.left_out if item.key == "actor_rollout_ref.rollout.temperature"]
    assert "inside an if" in unknown.reason
    assert "--set temperature=VALUE" in unknown.reason
    reasons = {item.key: item.reason for item in given.left_out}
    assert "--set trainer.experiment_name=VALUE" in reasons["trainer.experiment_name"]


def test_set_gives_a_script_what_its_environment_would(tmp_path: Path) -> None:
    file = write(tmp_path, "run.sh", SCRIPT)
    values = read_keys(SOURCES["verl"], file, {"MINI": "4", "temperature": "0.5"}).values
    assert values["data.train_batch_size"] == 8
    assert values["actor_rollout_ref.rollout.temperature"] == 0.5


def test_a_script_without_a_launch_command_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="starts 0 programs"):
        read_keys(SOURCES["verl"], write(tmp_path, "run.sh", "echo hello\n"), {})


def test_set_gives_a_value_that_a_command_of_the_script_decides(tmp_path: Path) -> None:
    text = "trl grpo --per_device_train_batch_size 8 --learning_rate $(cat rate) --run_name $NAME"
    file = write(tmp_path, "run.sh", text)
    [unknown] = read_keys(SOURCES["trl"], file, {"NAME": "mine"}).left_out
    assert unknown.key == "learning_rate" and "--set learning_rate=VALUE" in unknown.reason

    keys = read_keys(SOURCES["trl"], file, {"NAME": "mine", "learning_rate": "1e-5"})
    assert keys.values == {"per_device_train_batch_size": 8, "learning_rate": 1e-5, "run_name": "mine"}
    assert keys.left_out == []


def test_arguments_of_mindrlhfs_main_join_its_yaml(tmp_path: Path) -> None:
    write(tmp_path, "grpo_config.yaml", (PUBLISHED / "mindrlhf_qwen2.5_7b.yaml").read_text())
    text = "export M=/models/qwen25_7b\nmsrun examples/main.py --config examples/grpo_config.yaml --tokenizer_dir $M"
    result = import_file(
        SOURCES["mindrlhf"], write(tmp_path, "run.sh", f"{text} --verifier_function format_reward"), {}
    )
    assert str(result.config.model.path) == "/models/qwen25_7b"
    assert result.config.model.architecture == "qwen2.5-7b"
    assert [function.name for function in result.config.rewards.functions] == ["format_reward"]
    given = {"rl_config.tokenizer_dir": "/models/qwen3_8b"}
    assert str(import_file(SOURCES["mindrlhf"], tmp_path / "run.sh", given).config.model.path) == "/models/qwen3_8b"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("loss_type: grpo", {"aggregation": "seq_mean_token_mean", "loss": "ppo_clip"}),
        (
            "loss_type: dr_grpo\nscale_rewards: false",
            {"aggregation": "seq_mean_token_sum_norm", "advantage": "dr_grpo"},
        ),
        ("loss_type: cispo\nepsilon_high: 5.0", {"loss": "cispo", "clip_high": 4.0}),
        ("loss_type: grpo\nimportance_sampling_level: sequence\nepsilon: 3.0e-4", {"loss": "gspo", "clip_low": 3e-4}),
        ("delta: 2.0", {"dual_clip": 2.0}),
        ("scale_rewards: batch", {"advantage": "lite_ppo"}),
        ("multi_objective_aggregation: normalize_then_sum", {"advantage": "gdpo", "advantage_norm": "batch"}),
        ("beta: 0.04\nuse_bias_correction_kl: true", {"kl_beta": 0.04, "kl_estimator": "unbiased_k3"}),
    ],
)
def test_the_objectives_of_trl(tmp_path: Path, given: str, found: dict[str, Any]) -> None:
    file = write(tmp_path, "trl.yaml", f"model_name_or_path: m\nper_device_train_batch_size: 8\n{given}\n")
    objective = import_file(SOURCES["trl"], file, {}).config.trainer.objective
    assert {key: getattr(objective, key) for key in found} == found


def test_ids_stay_ids_and_folders_are_yours_to_check(tmp_path: Path) -> None:
    shared = "per_device_train_batch_size: 8\ndataset_name: acme/sums\nmodel_name_or_path: "
    for path, said in (("Qwen/Qwen2.5-7B", "an id of Hugging Face"), ("/data/qwen", "yours to check")):
        result = import_file(SOURCES["trl"], write(tmp_path, "trl.yaml", shared + path), {})
        settings = {setting.key: setting for setting in result.settings}
        assert str(result.config.model.path) == path and said in settings["model.path"].comment
        assert "async-grpo prepare --dataset acme/sums" in settings["data.path"].comment
        assert f"--model {path} " in settings["data.path"].comment


def test_completions_that_make_no_whole_groups_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "trl.yaml", "per_device_train_batch_size: 6\nnum_generations: 4\n")
    with pytest.raises(ConfigError, match="--set num_processes=N"):
        import_file(SOURCES["trl"], file, {})


def test_updates_of_a_round_of_generation_become_mini_batches(tmp_path: Path) -> None:
    lines = [
        "per_device_train_batch_size: 8",
        "steps_per_generation: 4",
        "gradient_accumulation_steps: 2",
        "max_steps: 40",
        "warmup_steps: 10",
    ]
    config = import_file(SOURCES["trl"], write(tmp_path, "trl.yaml", "\n".join(lines)), {}).config
    assert (config.groups_per_step, config.trainer.mini_batches, config.steps) == (4, 2, 20)
    assert config.trainer.optimizer.warmup_steps == 5  # 10 updates


@pytest.mark.parametrize(
    ("per_generation", "accumulation", "groups"),
    [(8, 8, 8), (4, 8, 8), (1, 8, 8), (8, 4, 8)],
)
def test_a_step_has_all_completions_of_an_update_of_trl(
    tmp_path: Path, per_generation: int, accumulation: int, groups: int
) -> None:
    lines = [
        "per_device_train_batch_size: 8",
        f"steps_per_generation: {per_generation}",
        f"gradient_accumulation_steps: {accumulation}",
        "max_steps: 40",
    ]
    config = import_file(SOURCES["trl"], write(tmp_path, "trl.yaml", "\n".join(lines)), {}).config
    assert (config.groups_per_step, config.group_size) == (groups, 8)
    assert config.steps * config.trainer.mini_batches == 40


def test_rounds_and_updates_of_trl_that_do_not_fit_are_marked(tmp_path: Path) -> None:
    text = "per_device_train_batch_size: 8\nsteps_per_generation: 3\ngradient_accumulation_steps: 4\n"
    result = import_file(SOURCES["trl"], write(tmp_path, "trl.yaml", text), {})
    settings = {setting.key: setting for setting in result.settings}
    assert settings["groups_per_step"].value == 4 and "CHANGE ME" in settings["groups_per_step"].comment


VERL_SIZES = """\
data: {{train_batch_size: 8}}
trainer: {{n_gpus_per_node: {devices}, nnodes: {nodes}, device: cuda}}
actor_rollout_ref:
  actor: {{megatron: {{tensor_model_parallel_size: {trains}}}}}
  rollout: {{tensor_model_parallel_size: {generates}, n: 4}}
"""


@pytest.mark.parametrize(
    ("devices", "trains", "generates", "ranks", "servers"),
    [(1, 1, 1, 1, 1), (8, 8, 4, 8, 2), (8, 8, 8, 8, 1), (16, 16, 2, 16, 8)],
)
def test_devices_that_are_too_few_for_two_sides_are_shared(
    tmp_path: Path, devices: int, trains: int, generates: int, ranks: int, servers: int
) -> None:
    text = VERL_SIZES.format(devices=devices, nodes=1, trains=trains, generates=generates)
    result = import_file(SOURCES["verl"], write(tmp_path, "verl.yaml", text), {})
    config, comments = result.config, {setting.key: setting.comment for setting in result.settings}
    assert config.launch.share_devices == "sleep"
    assert (config.trainer.processes, config.rollout.servers) == (ranks, servers)
    given = assign_devices(config, {}, devices)
    assert {index for role in given.values() for index in role["CUDA_VISIBLE_DEVICES"].split(",")} == {
        str(index) for index in range(devices)
    }
    assert "CHANGE ME" in comments["rollout.vllm.kv_cache_bytes"]


@pytest.mark.parametrize(
    ("devices", "trains", "generates", "ranks", "servers"),
    [(2, 1, 1, 1, 1), (8, 1, 6, 2, 1), (8, 4, 2, 4, 2), (16, 8, 2, 8, 4)],
)
def test_devices_that_suffice_for_two_sides_are_split(
    tmp_path: Path, devices: int, trains: int, generates: int, ranks: int, servers: int
) -> None:
    text = VERL_SIZES.format(devices=devices, nodes=1, trains=trains, generates=generates)
    config = import_file(SOURCES["verl"], write(tmp_path, "verl.yaml", text), {}).config
    assert (config.trainer.processes, config.rollout.servers) == (ranks, servers)
    assert ranks + servers * generates <= devices and config.launch.share_devices == "off"


def test_machines_that_the_trainer_fills_are_marked(tmp_path: Path) -> None:
    text = VERL_SIZES.format(devices=8, nodes=2, trains=16, generates=2)
    result = import_file(SOURCES["verl"], write(tmp_path, "verl.yaml", text), {})
    assert (result.config.trainer.nodes, result.config.trainer.processes) == (2, 16)
    assert "CHANGE ME" in {setting.key: setting.comment for setting in result.settings}["trainer.processes"]


def test_a_file_of_mindspeed_rl_needs_no_more_devices_than_it_has(tmp_path: Path) -> None:
    text = (PUBLISHED / "mindspeed_rl_grpo_qwen25_7b.yaml").read_text()
    larger = re.sub(r"tensor_model_parallel_size: 2\b", "tensor_model_parallel_size: 8", text)
    config = import_file(SOURCES["mindspeed-rl"], write(tmp_path, "msrl.yaml", larger), {}).config
    assert config.trainer.tensor_parallel == 8 and config.trainer.pipeline_parallel == 2
    assert len(assign_devices(config, {}, 16)) == 1 + config.rollout.servers == 17


@pytest.mark.parametrize(
    ("name", "npus", "given", "nodes"),  # of configs/ and examples/ of MindSpeed-RL
    [
        ("grpo_qwen25_32b_A2.yaml", 16, {}, 2),
        ("dapo_qwen25_32b_A2_20k.yaml", 64, {}, 8),
        ("dapo_qwen25_32b_A3_32k.yaml", 64, {}, 4),
        ("grpo_deepseek_r1_671b_A3.yaml", 256, {}, 16),
        ("mine.yaml", 32, {"NPUS_PER_NODE": "8"}, 4),
    ],
)
def test_half_of_the_machines_of_a_mindspeed_rl_file_train(
    tmp_path: Path, name: str, npus: int, given: dict[str, str], nodes: int
) -> None:
    text = (PUBLISHED / "mindspeed_rl_grpo_qwen25_7b.yaml").read_text()
    file = write(tmp_path, name, text.replace("num_npus: 16", f"num_npus: {npus}"))
    result = import_file(SOURCES["mindspeed-rl"], file, given)
    trainer, comments = result.config.trainer, {setting.key: setting.comment for setting in result.settings}
    assert (trainer.nodes, trainer.processes) == (nodes // 2, npus // 2)
    assert "async-grpo rollout" in comments["rollout.servers"]


def test_weights_of_a_mindspeed_rl_file_without_bf16_are_float32(tmp_path: Path) -> None:
    text = (PUBLISHED / "mindspeed_rl_grpo_qwen25_7b.yaml").read_text()
    for given, precision in (("true", "bfloat16"), ("false", "float32")):
        file = write(tmp_path, "msrl.yaml", re.sub(r"bf16: true", f"bf16: {given}", text))
        keys = import_file(SOURCES["mindspeed-rl"], file, {"generate_config.dtype": "null"})
        assert keys.config.model.precision == precision


def test_an_engine_that_runs_eager_in_the_file_says_what_that_costs() -> None:
    settings = {setting.key: setting for setting in imported("mindspeed_rl_grpo_qwen25_7b.yaml").settings}
    eager = settings["rollout.vllm.enforce_eager"]
    assert eager.value is True  # MindSpeed-RL's default
    assert "false captures graphs" in eager.comment


def test_values_that_are_the_default_are_listed_too(tmp_path: Path) -> None:
    result = imported("mindspeed_rl_grpo_qwen25_7b.yaml")
    given = read_keys(SOURCES["mindspeed-rl"], PUBLISHED / "mindspeed_rl_grpo_qwen25_7b.yaml", {}).values
    listed = {item.key for item in result.defaults} & set(given)
    assert {"rl_config.adv_estimator", "generate_config.sampling_config.top_p"} <= listed
    assert "rl_config.adv_estimator: 'group_norm'" in result.format_yaml("x")


def outcomes(result: Imported) -> dict[str, str]:
    """Outcome by the last part of each key."""
    return {item.key.rpartition(".")[2]: item.outcome for item in result.keys}


def test_sampling_arrives_as_it_is() -> None:
    result = imported("mindrlhf_qwen2.5_7b.yaml")
    sampling = result.config.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.8, 20, 0.8)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.min_tokens) == (0.0, 1.05, 2)
    names = ("temperature", "top_k", "top_p", "repetition_penalty", "max_tokens", "min_tokens")
    assert {outcomes(result)[name] for name in names} == {"same"}
    assert not [item.key for item in result.left_out if ".sampling_config." in item.key]


@pytest.mark.parametrize(
    ("source", "given", "min_tokens", "outcome"),
    [
        ("mindrlhf", "top_k: 20, min_tokens: 3", 3, "same"),
        ("areal", "top_k: 20, min_new_tokens: 3", 3, "same"),
        ("areal", "top_p: 1.0, min_new_tokens: 3", 0, "not supported"),
    ],
)
def test_a_minimum_length_needs_top_k(tmp_path: Path, source: str, given: str, min_tokens: int, outcome: str) -> None:
    section, other = SAMPLING[source]
    result = import_file(SOURCES[source], write(tmp_path, "run.yaml", f"{section % given}\n{other}\n"), {})
    assert result.config.sampling.min_tokens == min_tokens
    key = "min_tokens" if source == "mindrlhf" else "min_new_tokens"
    assert outcomes(result)[key] == outcome


SAMPLING: dict[str, tuple[str, str]] = {
    "mindspeed-rl": ("generate_config: {sampling_config: {%s}}", "actor_config: {}"),
    "mindrlhf": ("generate_config: {sampling_config: {%s}}", "rl_config: {num_rollouts: 4}"),
    "verl": ("actor_rollout_ref: {rollout: {n: 8, %s}}", "data: {train_batch_size: 256}"),
    "trl": ("%s", "per_device_train_batch_size: 8"),
    "areal": ("gconfig: {n_samples: 8, %s}", "train_dataset: {batch_size: 8}"),
}
WITHOUT = {"mindrlhf": ("min_p",), "areal": ("min_p", "repetition_penalty")}
"""Settings that the system's engine does not get."""


@pytest.mark.parametrize("source", SAMPLING)
@pytest.mark.parametrize(
    ("given", "expected", "approximated"),  # expected: top_k, top_p, min_p, repetition_penalty
    [
        ("top_k: 40, top_p: 0.9, min_p: 0.05, repetition_penalty: 1.1", (40, 0.9, 0.05, 1.1), []),
        ("top_k: 64, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0", (64, 1.0, 0.0, 1.0), []),
        ("top_k: 500, top_p: 0.9, repetition_penalty: 1.0", (64, 0.9, 0.0, 1.0), ["top_k"]),
        ("top_k: -1, top_p: 0.9, repetition_penalty: 1.0", (64, 0.9, 0.0, 1.0), ["top_p"]),
        ("top_k: 0, top_p: 1.0, repetition_penalty: 1.2", (64, 1.0, 0.0, 1.2), ["repetition_penalty"]),
        ("top_k: -1, top_p: 1.0, repetition_penalty: 1.0", (0, 1.0, 0.0, 1.0), []),
    ],
)
def test_each_system_keeps_its_sampled_distribution(
    tmp_path: Path, source: str, given: str, expected: tuple[float, ...], approximated: list[str]
) -> None:
    section, other = SAMPLING[source]
    line = (section % given) if source != "trl" else given.replace(", ", "\n")
    result = import_file(SOURCES[source], write(tmp_path, "run.yaml", f"{line}\n{other}\n"), {})
    sampling = result.config.sampling
    names = ("top_k", "top_p", "min_p", "repetition_penalty")
    neutral = {"min_p": 0.0, "repetition_penalty": 1.0}
    missing = WITHOUT.get(source, ())
    if missing and approximated == ["repetition_penalty"] and "repetition_penalty" in missing:
        pytest.skip("the engine of this system has no repetition penalty")
    for name, value in zip(names, expected, strict=True):
        assert getattr(sampling, name) == (neutral[name] if name in missing else value), name
    assert [name for name in names if outcomes(result).get(name) == "approximated"] == approximated


def test_penalties_that_count_tokens_are_not_supported(tmp_path: Path) -> None:
    text = SAMPLING["verl"][0] % "presence_penalty: 0.5, frequency_penalty: 0.0"
    result = import_file(SOURCES["verl"], write(tmp_path, "run.yaml", text), {})
    assert outcomes(result)["presence_penalty"] == "not supported"
    assert outcomes(result)["frequency_penalty"] == "same"
    assert (
        "replay the counts"
        in {item.key: item.reason for item in result.left_out}["actor_rollout_ref.rollout.presence_penalty"]
    )


def test_a_file_of_another_system_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "run.yaml", "max_staleness: 2\nsteps: 3\n")
    with pytest.raises(ConfigError, match="no key of MindSpeed-RL"):
        import_file(SOURCES["mindspeed-rl"], file, {})


def test_a_key_that_is_off_loses_nothing(tmp_path: Path) -> None:
    text = "per_device_train_batch_size: 8\nuse_liger_kernel: false\nuse_peft: true\n"
    result = import_file(SOURCES["trl"], write(tmp_path, "run.yaml", text), {})
    assert outcomes(result)["use_liger_kernel"] == "same"
    assert outcomes(result)["use_peft"] == "not supported"


def test_what_runs_always_do_is_approximated_where_the_file_switches_it_off(tmp_path: Path) -> None:
    for value, outcome in (("true", "same"), ("false", "approximated")):
        text = f"data: {{train_batch_size: 8}}\ntrainer: {{balance_batch: {value}}}\n"
        result = import_file(SOURCES["verl"], write(tmp_path, "run.yaml", text), {})
        assert outcomes(result)["balance_batch"] == outcome


def test_values_to_check_are_approximated(tmp_path: Path) -> None:
    result = import_file(SOURCES["verl"], write(tmp_path, "v.yaml", "actor_rollout_ref: {rollout: {n: 1}}"), {})
    assert outcomes(result)["n"] == "approximated"


def test_a_single_sample_of_a_prompt_is_marked(tmp_path: Path) -> None:
    file = write(tmp_path, "verl.yaml", "data: {train_batch_size: 8}\nactor_rollout_ref: {model: {path: ~/m}}\n")
    settings = {setting.key: setting for setting in import_file(SOURCES["verl"], file, {}).settings}
    assert settings["group_size"].value == 2 and "CHANGE ME: 1 there" in settings["group_size"].comment
    assert settings["model.path"].value == str(Path.home() / "m")


def test_an_unknown_key_is_listed_with_the_nearest_of_ours(tmp_path: Path) -> None:
    file = write(tmp_path, "trl.yaml", "per_device_train_batch_size: 8\nweight_decays: 1\nWANDB_API_KEY: abc\n")
    items = {item.key: item for item in import_file(SOURCES["trl"], file, {}).left_out}
    assert items["weight_decays"].ours == "trainer.optimizer.weight_decay"
    assert items["WANDB_API_KEY"].shown == "(hidden)"


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    out = write(tmp_path, "run.yaml", "mine")
    result = type_in("import-config", str(PUBLISHED / "trl_open_r1_code.yaml"), "--from", "trl", "-o", str(out))
    assert result.exit_code == 1 and "would be overwritten" in result.output
    assert out.read_text() == "mine"


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_tables_name_keys_that_exist(source: SourceSystem) -> None:
    keys = set(dotted_keys(RunConfig))
    for row in source.rows:
        for ours in filter(None, [*row.ours, row.near]):
            assert ours in keys or ours.startswith("rollout.vllm.extra."), (row.theirs, ours)


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_every_row_of_a_table_has_one_meaning(source: SourceSystem) -> None:
    theirs = [row.theirs for row in source.rows]
    assert [key for key, count in Counter(theirs).items() if count > 1] == []
    for row in source.rows:
        assert [bool(row.ours), bool(row.dropped), bool(row.always)].count(True) == 1, row.theirs
        assert row.convert in ("", *CONVERSIONS), row.theirs
        assert row.ours or not (row.convert or row.note or row.comment or row.default is not None), row.theirs
        assert row.convert or not (row.comment or row.above is not None), row.theirs
        assert set(row.unless) <= set(theirs), row.theirs
        assert source.find_row(row.theirs.replace("*", "other")) is row, f"{row.theirs} is hidden by another row"


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_the_page_has_the_tables_of_the_code(source: SourceSystem) -> None:
    page = (ROOT / "docs" / page_name(source)).read_text()
    assert page == insert_tables(page, source), "run `make reference`"


def test_every_source_can_be_named() -> None:
    assert [name.value for name in SourceName] == list(SOURCES)


def test_flattening_reads_exponents_as_numbers() -> None:
    assert flatten({"lr": "1e-6", "a": {"b": "x"}}) == {"lr": 1e-6, "a.b": "x"}
