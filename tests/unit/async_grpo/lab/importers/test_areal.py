"""The importer for AReaL: values, references, and its rejection sampling against the formulas in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from async_grpo.app.cli.main import app
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.errors import ConfigError
from async_grpo.lab.importers import SOURCES
from async_grpo.lab.importers.references import resolve_references
from async_grpo.lab.importers.translation import Imported, import_file
from tests.unit.async_grpo.lab.importers.test_imported_corrections import multiply_corrections, random_ratios

EXAMPLE = Path(__file__).with_name("areal_example.yaml")


def import_actor(folder: Path, actor: dict[str, Any], **sections: Any) -> Imported:
    file = folder / "areal.yaml"
    file.write_text(yaml.safe_dump({"actor": actor, "train_dataset": {"batch_size": 8, "type": "rl"}, **sections}))
    return import_file(SOURCES["areal"], file, {})


def find_outcomes(result: Imported) -> dict[str, str]:
    return {item.key: item.outcome for item in result.keys}


def test_an_example_becomes_these_values() -> None:
    result = import_file(SOURCES["areal"], EXAMPLE, {}, rows=640)
    config, objective = result.config, result.config.trainer.objective
    assert (config.name, config.seed, config.steps) == ("sums-trial0", 3, 40)  # 2 * 640 / 32
    assert (config.groups_per_step, config.group_size, config.max_staleness) == (32, 4, 2)
    assert (config.sampling.temperature, config.sampling.top_p, config.sampling.top_k) == (0.9, 0.95, 64)
    assert (config.sampling.max_tokens, config.data.max_prompt_tokens) == (512, 256)
    assert str(config.data.path) == "openai/gsm8k"
    assert (config.trainer.processes, config.trainer.tensor_parallel, config.trainer.mini_batches) == (4, 2, 2)
    assert (config.rollout.servers, config.rollout.vllm.tensor_parallel) == (2, 2)
    assert config.rollout.max_concurrency == 128  # 64 groups of 4 on 2 servers
    assert (config.trainer.recompute, config.trainer.micro_batch_tokens) == ("full", 8192)
    optimizer = config.trainer.optimizer
    assert (optimizer.lr, optimizer.min_lr, optimizer.warmup_steps) == (1e-5, 1e-6, 4)
    assert (objective.advantage, objective.advantage_norm, objective.aggregation) == ("grpo", "batch", "token_mean")
    assert (objective.loss, objective.prox) == ("decoupled", "recompute")
    assert (objective.behaviour_cap, objective.behaviour_cap_mode) == (5.0, "mask")
    assert (objective.clip_low, objective.clip_high, objective.kl_beta) == (0.2, 0.28, 0.0)
    assert (config.trainer.checkpoint.every_steps, config.eval.every_steps) == (20, 10)
    assert config.telemetry.trackers == ["wandb"]


def test_every_key_of_an_example_is_listed_once() -> None:
    result = import_file(SOURCES["areal"], EXAMPLE, {}, rows=640)
    keys = [item.key for item in result.keys]
    assert len(keys) == len(set(keys))
    outcomes = find_outcomes(result)
    assert outcomes["gconfig.top_p"] == "approximated"  # there without top_k
    assert outcomes["actor.rejection_sampling.upper"] == outcomes["rollout.max_head_offpolicyness"] == "same"
    assert outcomes["actor.reward_scaling"] == "same"  # without effect on normalised advantages
    assert not [item for item in result.keys if "does not know" in item.reason]


def test_the_written_file_passes_a_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["import-config", str(EXAMPLE), "--from", "areal", "--rows", "640", "-o", "run.yaml"]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    # Without the network: another data set and a known architecture.
    overrides = ["data.kind=arithmetic", "model.path=models/tiny", "model.architecture=qwen2.5-1.5b"]
    words = ["run", "run.yaml", "--dry-run", *(word for value in overrides for word in ("-o", value))]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output


def test_set_overrides_what_references_lead_to() -> None:
    result = import_file(SOURCES["areal"], EXAMPLE, {"gconfig.temperature": "0.5"}, rows=640)
    assert result.config.sampling.temperature == 0.5
    assert find_outcomes(result)["actor.temperature"] == "same"


REFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a value": ({"a": {"b": 3}, "c": "${a.b}"}, {"a": {"b": 3}, "c": 3}),
    "a chain": ({"a": "${b}", "b": "${c}", "c": 1}, {"a": 1, "b": 1, "c": 1}),
    "a section": (
        {"a": {"x": 1, "y": "${z}"}, "b": "${a}", "z": 2},
        {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 2}, "z": 2},
    ),
    "text": ({"a": "x", "b": "${a}-${a}.log"}, {"a": "x", "b": "x-x.log"}),
    "a list": ({"a": 1, "b": ["${a}", {"c": "${a}"}]}, {"a": 1, "b": [1, {"c": 1}]}),
    "a default": ({"a": "${oc.select:b.c,8}"}, {"a": 8}),
    "no such key": ({"a": "${b}"}, {"a": "${b}"}),
    "the environment": ({"a": "${oc.env:HOME}"}, {"a": "${oc.env:HOME}"}),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_references_lead_to(name: str) -> None:
    given, expected = REFERENCES[name]
    assert resolve_references(given, int) == expected


def test_references_to_themselves_are_refused() -> None:
    with pytest.raises(ConfigError, match="leads back to itself"):
        resolve_references({"a": "${b}", "b": "${a}"}, str)


def test_references_that_lead_nowhere_are_not_supported(tmp_path: Path) -> None:
    result = import_actor(tmp_path, {"path": "acme/tiny", "eps_clip": "${missing}"})
    [item] = [item for item in result.left_out if item.key == "actor.eps_clip"]
    assert "--set actor.eps_clip=VALUE" in item.reason


@pytest.mark.parametrize(
    ("reward_norm", "adv_norm", "advantage", "norm"),
    [
        ({"mean_level": "group", "std_level": "group"}, "batch", "grpo", "batch"),
        ({"mean_level": "group", "std_level": "group"}, None, "grpo", "none"),
        ({"mean_level": "group", "std_level": None}, "batch", "dr_grpo", "batch"),
        ({"mean_level": "group", "std_level": None, "mean_leave1out": True}, None, "rloo", "none"),
        ({"mean_level": "group", "std_level": "batch"}, "batch", "lite_ppo", "batch"),
        ({}, "batch", "reinforce_pp", "batch"),
        ({"mean_level": "batch", "std_level": "batch"}, "batch", "reinforce_pp", "batch"),
        (None, None, "reinforce_pp", "none"),
    ],
)
def test_normalisations(
    tmp_path: Path, reward_norm: dict[str, Any] | None, adv_norm: str | None, advantage: str, norm: str
) -> None:
    levels = {"mean_level": adv_norm, "std_level": adv_norm} if adv_norm else None
    result = import_actor(tmp_path, {"path": "m", "reward_norm": reward_norm, "adv_norm": levels})
    objective = result.config.trainer.objective
    assert (objective.advantage, objective.advantage_norm) == (advantage, norm)
    assert not [item for item in result.approximated if "norm" in item.key]


def test_rewards_that_are_not_normalised_keep_their_scale(tmp_path: Path) -> None:
    result = import_actor(tmp_path, {"path": "m", "reward_scaling": 10.0, "reward_bias": -0.5})
    assert result.config.rewards.functions[0].weight == 10.0
    assert find_outcomes(result)["actor.reward_bias"] == "not supported"


@pytest.mark.parametrize(
    ("actor", "loss", "prox"),
    [
        ({"use_decoupled_loss": False, "recompute_logprob": False}, "ppo_clip", "behaviour"),
        ({"use_decoupled_loss": False, "recompute_logprob": True}, "ppo_clip", "recompute"),
        ({"use_decoupled_loss": True}, "ppo_clip", "recompute"),  # AReaL has no weight without rejection_sampling
        ({"use_decoupled_loss": True, "rejection_sampling": {"upper": 4.0}}, "decoupled", "recompute"),
        ({"use_decoupled_loss": True, "behave_imp_weight_cap": 4.0}, "decoupled", "recompute"),
        (
            {"use_decoupled_loss": True, "rejection_sampling": {"upper": 4.0}, "prox_logp_method": "loglinear"},
            "decoupled",
            "loglinear",
        ),
        ({"use_sapo_loss": True}, "sapo", "behaviour"),
        ({"importance_sampling_level": "sequence"}, "gspo", "behaviour"),
    ],
)
def test_losses(tmp_path: Path, actor: dict[str, Any], loss: str, prox: str) -> None:
    objective = import_actor(tmp_path, {"path": "m", **actor}).config.trainer.objective
    assert (objective.loss, objective.prox, objective.corrections) == (loss, prox, [])


def weigh_as_areal(sequence: Sequence[float], rule: dict[str, Any]) -> list[float]:
    """behave_imp_weight times loss_mask of each token: apply_rejection_sampling of AReaL's functional.py.

    d is log w of each token.
    """
    metric, level, action = rule["metric"], rule["level"], rule["action"]
    low, high = rule.get("lower"), rule["upper"]
    estimators = {"kl_k1": lambda d: d, "kl_k2": lambda d: d * d / 2, "kl_k3": lambda d: math.exp(-d) - 1 + d}

    def is_inside(value: float) -> bool:
        return value <= high and (low is None or value >= low)

    def clamp(value: float) -> float:
        return min(max(value, low or 0.0), high)

    weights = [math.exp(d) for d in sequence]
    values = list(sequence) if metric == "ratio" else [estimators[metric](d) for d in sequence]
    if level == "sequence":
        whole = {"sum": sum(values), "mean": sum(values) / len(values), "max": max(values)}[rule["agg"]]
        values = [whole] * len(values)
        if metric == "ratio":
            weights = [math.exp(sum(sequence) / len(sequence))] * len(sequence)
    if metric == "ratio":
        values = [math.exp(value) for value in values]
    if action == "mask":
        return [weight if is_inside(value) else 0.0 for weight, value in zip(weights, values, strict=True)]
    if level == "token":
        return [clamp(weight) for weight in weights]
    return [weight if is_inside(value) else clamp(weight) for weight, value in zip(weights, values, strict=True)]


RULES = [
    {"metric": "ratio", "level": "token", "action": "mask", "upper": 1.2, "lower": 0.9},
    {"metric": "ratio", "level": "token", "action": "clamp", "upper": 1.2, "lower": 0.9},
    {"metric": "ratio", "level": "sequence", "agg": "mean", "action": "mask", "upper": 1.02},
    {"metric": "ratio", "level": "sequence", "agg": "mean", "action": "mask", "upper": 1.02, "lower": 0.95},
    {"metric": "ratio", "level": "sequence", "agg": "mean", "action": "clamp", "upper": 1.02, "lower": 0.95},
    {"metric": "ratio", "level": "sequence", "agg": "sum", "action": "mask", "upper": 1.1, "lower": 0.8},
    {"metric": "ratio", "level": "sequence", "agg": "sum", "action": "clamp", "upper": 1.1, "lower": 0.8},
    {"metric": "ratio", "level": "sequence", "agg": "max", "action": "mask", "upper": 1.1, "lower": 1.001},
    {"metric": "ratio", "level": "sequence", "agg": "max", "action": "clamp", "upper": 1.1},
    {"metric": "kl_k1", "level": "token", "action": "mask", "upper": 0.1},
    {"metric": "kl_k1", "level": "token", "action": "mask", "upper": 0.1, "lower": -0.05},
    {"metric": "kl_k1", "level": "sequence", "agg": "sum", "action": "mask", "upper": 0.1, "lower": -0.2},
    {"metric": "kl_k2", "level": "token", "action": "mask", "upper": 0.01},
    {"metric": "kl_k2", "level": "sequence", "agg": "sum", "action": "mask", "upper": 0.05},
    {"metric": "kl_k2", "level": "sequence", "agg": "mean", "action": "mask", "upper": 0.01},
    {"metric": "kl_k2", "level": "sequence", "agg": "max", "action": "mask", "upper": 0.02},
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(str(value) for value in rule.values()))
def test_rejection_sampling_gives_the_same_weights(tmp_path: Path, rule: dict[str, Any], seed: int) -> None:
    actor = {"path": "m", "use_decoupled_loss": True, "rejection_sampling": rule}
    result = import_actor(tmp_path, actor)
    ratios = random_ratios(seed)
    found = multiply_corrections(result.config.trainer.objective, ratios)
    for part, sequence in zip(found, ratios, strict=True):
        assert part == pytest.approx(weigh_as_areal(sequence, rule), rel=1e-9)
    assert not [item for item in result.approximated if "rejection" in item.key]


@pytest.mark.parametrize("action", ["mask", "clamp"])
def test_one_bound_of_tokens_is_the_decoupled_loss(tmp_path: Path, action: str) -> None:
    rule = {"upper": 3.0, "action": action}
    actor = {"path": "m", "use_decoupled_loss": True, "rejection_sampling": rule}
    objective: ObjectiveConfig = import_actor(tmp_path, actor).config.trainer.objective
    assert (objective.loss, objective.behaviour_cap, objective.behaviour_cap_mode) == ("decoupled", 3.0, action)


def test_k3_is_approximated_because_its_ratio_is_the_inverse(tmp_path: Path) -> None:
    rule = {"metric": "kl_k3", "level": "sequence", "upper": 0.01}
    result = import_actor(tmp_path, {"path": "m", "use_decoupled_loss": True, "rejection_sampling": rule})
    assert find_outcomes(result)["actor.rejection_sampling.metric"] == "approximated"
    assert [correction.kind for correction in result.config.trainer.objective.corrections] == ["weight", "reject"]


def test_a_divergence_is_subtracted_from_rewards(tmp_path: Path) -> None:
    for norm, outcome in ((None, "same"), ({"mean_level": "group", "std_level": "group"}, "approximated")):
        actor = {"path": "m", "kl_ctl": 0.01, "kl_estimator": "k2", "reward_norm": norm}
        result = import_actor(tmp_path, actor, ref={"path": "m"})
        objective = result.config.trainer.objective
        assert (objective.kl_beta, objective.kl_estimator, objective.kl_in) == (0.01, "k2", "reward")
        assert result.config.trainer.reference.source == "frozen"
        assert find_outcomes(result)["actor.kl_ctl"] == outcome


def test_a_divergence_without_a_reference_is_not_supported(tmp_path: Path) -> None:
    result = import_actor(tmp_path, {"path": "m", "kl_ctl": 0.01})
    assert find_outcomes(result)["actor.kl_ctl"] == "not supported"
    assert result.config.trainer.objective.kl_beta == 0


@pytest.mark.parametrize(
    ("backend", "ranks", "sizes"),
    [
        ("fsdp:d4", 4, (1, 1, 1, 1)),
        ("megatron:d2p2t2", 8, (2, 2, 1, 1)),
        ("megatron:(attn:d4p4t2|ffn:d2p4e4)", 32, (2, 4, 1, 4)),
        ("fsdp:d2c2", 4, (1, 1, 2, 1)),
    ],
)
def test_backends(tmp_path: Path, backend: str, ranks: int, sizes: tuple[int, ...]) -> None:
    cluster = {"n_nodes": 8, "n_gpus_per_node": 8}
    trainer = import_actor(tmp_path, {"path": "m", "backend": backend}, cluster=cluster).config.trainer
    assert trainer.processes == ranks
    parallel = (trainer.tensor_parallel, trainer.pipeline_parallel, trainer.context_parallel, trainer.expert_parallel)
    assert parallel == sizes


def test_the_older_allocation_mode(tmp_path: Path) -> None:
    result = import_actor(tmp_path, {"path": "m"}, allocation_mode="vllm:d4t2+fsdp:d8", cluster={"n_nodes": 1})
    assert (result.config.trainer.processes, result.config.rollout.servers) == (8, 4)


def test_files_of_other_algorithms_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only rl"):
        import_actor(tmp_path, {"path": "m"}, train_dataset={"type": "sft"})
