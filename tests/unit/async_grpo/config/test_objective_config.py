"""Presets, defaults per loss, and conflicts between settings of the objective."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import yaml

from async_grpo.algorithms import ADVANTAGES, CORRECTIONS, LOSSES, PROXIMALS
from async_grpo.algorithms.objective import ESTIMATORS
from async_grpo.config import RunConfig, dump, validate
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.config.presets import PRESETS
from async_grpo.errors import ConfigError


def run_with(objective: dict[str, Any]) -> RunConfig:
    raw = {"name": "test", "model": {"random": {}}, "trainer": {"objective": objective}}
    return validate(raw, "test.yaml")


def resolved_values(objective: ObjectiveConfig) -> tuple[Any, ...]:
    keys = ("advantage", "aggregation", "loss", "prox", "clip_low", "clip_high", "behaviour_cap")
    return tuple(getattr(objective, key) for key in keys)


@pytest.mark.parametrize(
    ("preset", "resolved"),
    [
        ("grpo", ("grpo", "seq_mean_token_mean", "ppo_clip", "behaviour", 0.2, 0.2, None)),
        ("dr_grpo", ("dr_grpo", "seq_mean_token_sum_norm", "ppo_clip", "behaviour", 0.2, 0.2, None)),
        ("dapo", ("grpo", "token_mean", "ppo_clip", "behaviour", 0.2, 0.28, None)),
        ("gspo", ("grpo", "seq_mean_token_mean", "gspo", "behaviour", 3e-4, 4e-4, None)),
        ("cispo", ("grpo", "token_mean", "cispo", "behaviour", None, 4.0, None)),
        ("areal", ("grpo", "token_mean", "decoupled", "recompute", 0.2, 0.28, 5.0)),
        ("tis", ("grpo", "token_mean", "ppo_clip", "recompute", 0.2, 0.28, None)),
        ("icepop", ("grpo", "token_mean", "ppo_clip", "recompute", 0.2, 0.28, None)),
        ("m2po", ("grpo", "token_mean", "ppo_clip", "behaviour", 0.2, 0.28, None)),
        ("vcpo", ("opob", "seq_mean_token_mean", "ppo_clip", "recompute", 0.2, 0.28, None)),
        ("prime_rl", ("dr_grpo", "token_mean", "dppo_tv", "behaviour", 0.2, 0.2, 20.0)),
        ("scale_rl", ("lite_ppo", "prompt_mean", "cispo", "behaviour", None, 4.0, None)),
    ],
)
def test_a_preset_sets_all_values(preset: str, resolved: tuple[Any, ...]) -> None:
    assert preset in PRESETS
    assert resolved_values(ObjectiveConfig(preset=preset)) == resolved


def test_explicit_corrections_replace_those_of_the_preset() -> None:
    vcpo = ObjectiveConfig(preset="vcpo")
    assert [(correction.kind, correction.cap) for correction in vcpo.corrections] == [
        ("seq_tis", 8.0),
        ("ess_lr", None),
    ]
    assert (vcpo.scales_learning_rate, vcpo.advantages_use_weights, vcpo.needs_forward_pass) == (True, True, True)
    assert [correction.kind for correction in ObjectiveConfig(preset="tis", corrections=["icepop"]).corrections] == [
        "icepop"
    ]


def test_default_is_areal_with_masked_weights() -> None:
    assert ObjectiveConfig() == ObjectiveConfig(preset="areal", behaviour_cap_mode="mask")


def test_a_preset_does_not_normalise_another_advantage_than_its_own() -> None:
    assert ObjectiveConfig().advantage_norm == "batch"
    assert ObjectiveConfig(advantage="rloo").advantage_norm == "none"
    assert ObjectiveConfig(loss="ppo_clip").advantage_norm == "batch"
    resolved_before_the_key = {"preset": "areal", "advantage": "grpo", "aggregation": "token_mean", "loss": "decoupled"}
    assert ObjectiveConfig.model_validate(resolved_before_the_key).advantage_norm == "none"


def test_a_streamed_step_leaves_the_presets_normalisation_out() -> None:
    assert run_with({}).trainer.objective.advantage_norm == "batch"
    streamed = validate({"name": "test", "model": {"random": {}}, "trainer": {"streaming": True}}, "test")
    assert streamed.trainer.objective.advantage_norm == "none"


def test_prime_rl_adds_its_divergence_from_the_behaviour_policy() -> None:
    objective = run_with({"preset": "prime_rl"}).trainer.objective
    assert (objective.kl_to, objective.kl_estimator, objective.kl_beta) == ("behaviour", "k2", 2e-3)
    assert not objective.needs_reference


def test_explicit_keys_take_precedence_over_the_preset() -> None:
    objective = ObjectiveConfig(preset="gspo", advantage="rloo", clip_high=0.01)
    assert (objective.advantage, objective.clip_low, objective.clip_high) == ("rloo", 3e-4, 0.01)


def test_a_different_loss_uses_its_own_defaults() -> None:
    assert resolved_values(ObjectiveConfig(loss="gspo"))[1:6] == (
        "seq_mean_token_mean",
        "gspo",
        "behaviour",
        3e-4,
        4e-4,
    )
    assert ObjectiveConfig(loss="ppo_clip").prox == "behaviour"


@pytest.mark.parametrize("preset", PRESETS)
def test_resolved_objective_shows_all_values_and_loads_equal(preset: str) -> None:
    config = run_with({"preset": preset, "corrections": ["geo_rs", {"kind": "opsm", "limit": 0.1}]})
    text = dump(config)
    assert f"loss: {config.trainer.objective.loss}" in text
    assert "high: 1.002" in text
    assert ObjectiveConfig.model_validate(config.trainer.objective.model_dump(mode="json")) == config.trainer.objective


@pytest.mark.parametrize("loss", LOSSES)
def test_configuration_allows_every_implemented_choice(loss: str) -> None:
    for advantage, estimator in product([*ADVANTAGES, "gdpo"], [*ESTIMATORS, "unbiased_k3"]):
        objective = ObjectiveConfig(advantage=advantage, loss=loss, kl_estimator=estimator)
        assert (objective.loss, objective.advantage, objective.kl_estimator) == (loss, advantage, estimator)
    assert {ObjectiveConfig(loss="ppo_clip", prox=prox).prox for prox in PROXIMALS} == {*PROXIMALS}


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_correction_given_by_name_gets_its_defaults(kind: str) -> None:
    (correction,) = ObjectiveConfig(loss="ppo_clip", prox="recompute", corrections=[kind]).corrections
    assert correction.upper is not None or correction.limit is not None


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"preset": "grpp"}, "trainer.objective.preset: 'grpp'"),
        ({"loss": "gspoo"}, "loss 'gspoo'.*'gspo'"),
        ({"advantage": "gae"}, "advantage 'gae'.*grpo"),
        ({"aggregation": "token_men"}, "aggregation 'token_men'.*'token_mean'"),
        ({"aggregation": "my.module:mean"}, "aggregation 'my.module:mean'"),
        ({"corrections": ["token_tys"]}, "correction 'token_tys'.*'token_tis'"),
        ({"corrections": [{"kind": "opsm", "cap": 2}]}, "cap .*correction opsm.*limit"),
        ({"corrections": [{"kind": "seq_mis", "low": 3}]}, r"correction seq_mis: low \(3\)"),
        ({"corrections": [{"kind": "seq_mis", "low": None}]}, "correction seq_mis needs low"),
        ({"corrections": [{"kind": "geo_rs", "whole_batch": True}]}, "whole_batch .*geo_rs"),
        ({"corrections": ["geo_rs", "geo_rs"]}, "geo_rs is given twice"),
        ({"corrections": [{"kind": "geo_rs", "level": "token"}]}, "geo_rs has level seq_mean.*kind reject"),
        ({"corrections": [{"kind": "weight", "level": "seq_max"}]}, "weight has no level seq_max.*token or seq or geo"),
        ({"corrections": [{"kind": "reject", "low": 0.1, "high": 0.2}]}, "low has no effect on reject with k3"),
        ({"kl_beta": 0.1, "kl_to": "behaviour", "kl_in": "reward"}, "kl_in reward with kl_to behaviour"),
        ({"kl_beta": 0.1, "kl_estimator": "unbiased_k3", "kl_in": "reward"}, "unbiased_k3"),
        ({"corrections": ["token_tis"]}, "loss decoupled .*Drop token_tis"),
        ({"loss": "topr", "corrections": ["seq_tis"]}, "loss topr .*Drop seq_tis"),
        ({"preset": "grpo", "corrections": ["icepop"]}, "prox behaviour .*ppo_clip .*Drop icepop"),
        (
            {"loss": "ppo_clip", "prox": "recompute", "corrections": ["token_tis", "icepop"]},
            "token_tis and icepop",
        ),
        ({"loss": "gspo", "aggregation": "token_mean"}, "gspo .*aggregation to seq_mean_token_mean"),
        ({"loss": "gmpo", "aggregation": "token_sum"}, "gmpo .*aggregation to seq_mean_token_mean"),
        ({"loss": "decoupled", "prox": "behaviour"}, "decoupled with prox behaviour.*recompute or loglinear"),
        ({"loss": "dppo_tv", "prox": "recompute"}, "dppo_tv with prox recompute.*prox to behaviour"),
        ({"loss": "sapo", "clip_low": 0.1}, "clip_low .*loss sapo"),
        ({"preset": "gspo", "dual_clip": None, "behaviour_cap": 2}, "behaviour_cap .*loss gspo"),
        ({"loss": "dppo_tv", "behaviour_cap_mode": "mask"}, "behaviour_cap_mode .*loss dppo_tv"),
        ({"clip_low": 1.5}, r"clip_low \(1\.5\)"),
        ({"clip_high": None}, "loss decoupled needs clip_high"),
        ({"options": {"scale": 2}}, r"options .*decoupled"),
    ],
)
def test_invalid_objectives_are_rejected_with_reason_and_fix(objective: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        run_with(objective)
    assert "trainer.objective" in str(refusal.value)


@pytest.mark.parametrize("kind", ["seq_mis", "geo_rs", "m2po", "opsm", "ess_lr"])
@pytest.mark.parametrize("preset", PRESETS)
def test_corrections_without_weights_work_with_every_preset(preset: str, kind: str) -> None:
    assert run_with({"preset": preset, "corrections": [kind]}).trainer.objective.corrections[0].kind == kind


def test_summary_shows_the_resolved_values() -> None:
    assert ObjectiveConfig(corrections=["geo_rs"]).summary == (
        "areal: grpo advantages over the batch, decoupled (prox recompute, clip_low 0.2, clip_high 0.28, "
        "behaviour_cap 5, behaviour_cap_mode mask) + geo_rs, token_mean"
    )


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize(
    ("objective", "corrections"),
    [
        ({"preset": "dapo", "prox": "recompute"}, ["token_tis"]),
        ({"preset": "dapo"}, []),  # its ratio is the weight
        ({}, []),  # decoupled carries it
        ({"preset": "icepop"}, ["icepop"]),
        ({"preset": "dapo", "prox": "recompute", "corrections": []}, []),
        ({"loss": "mine:loss", "prox": "recompute"}, []),
    ],
)
def test_quantized_engines_add_an_importance_weight_unless_one_is_included(
    quantization: str, objective: dict[str, Any], corrections: list[str]
) -> None:
    raw: dict[str, Any] = {"name": "test", "model": {"random": {}}, "trainer": {"objective": objective}}
    plain = validate(raw, "test.yaml").trainer.objective
    config = validate(raw | {"rollout": {"vllm": {"quantization": quantization}}}, "test.yaml")
    assert [correction.kind for correction in config.trainer.objective.corrections] == corrections
    if corrections != ["token_tis"]:
        assert config.trainer.objective == plain
    assert validate(yaml.safe_load(dump(config)), "resolved.yaml") == config


@pytest.mark.parametrize(
    ("vllm", "model", "message"),
    [
        (
            {"quantization": "fp8", "platform": "ascend"},
            {"precision": "bfloat16"},
            r"fp8.*rollout\.vllm\.quantization to int8",
        ),
        (
            {"quantization": "fp8", "platform": "cuda"},
            {"precision": "float32"},
            r"rollout\.vllm\.quantization is fp8.*model\.precision to bfloat16",
        ),
        (
            {"quantization": "int8"},
            {"lora": {"engine": "adapters"}},
            r"quantization is int8.*model\.lora\.engine to merged",
        ),
        ({"quantization": "int8", "extra": {"load_format": "dummy"}}, {}, "quantization is int8.*load_format"),
        ({"extra": {"quantization": "fp8"}}, {}, "extra sets quantization"),
    ],
)
def test_conflicts_with_quantization_are_rejected(vllm: Any, model: Any, message: str) -> None:
    raw = {"name": "test", "model": {"random": {}, **model}, "rollout": {"vllm": vllm}}
    with pytest.raises(ConfigError, match=message):
        validate(raw, "test.yaml")


def test_context_parallel_in_float32_is_rejected_on_cuda() -> None:
    trainer = {"platform": "cuda", "processes": 2, "context_parallel": 2}
    raw: dict[str, Any] = {"name": "test", "model": {"random": {}, "precision": "float32"}, "trainer": trainer}
    with pytest.raises(ConfigError, match=r"trainer\.context_parallel is 2.*model\.precision"):
        validate(raw, "test.yaml")
    raw["model"]["precision"] = "bfloat16"
    assert validate(raw, "test.yaml").trainer.context_parallel == 2
