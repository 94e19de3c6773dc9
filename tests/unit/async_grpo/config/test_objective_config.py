"""Presets, defaults that follow from the loss, and combinations that are refused with a way out."""

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


def shown(objective: ObjectiveConfig) -> tuple[Any, ...]:
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
    ],
)
def test_a_preset_sets_all_rows_together(preset: str, resolved: tuple[Any, ...]) -> None:
    assert preset in PRESETS
    assert shown(ObjectiveConfig(preset=preset)) == resolved


def test_presets_of_corrections_set_them_and_a_list_of_ones_own_replaces_theirs() -> None:
    vcpo = ObjectiveConfig(preset="vcpo")
    assert [(one.kind, one.cap) for one in vcpo.corrections] == [("seq_tis", 8.0), ("ess_lr", None)]
    assert (vcpo.scales_step, vcpo.weighs_samples, vcpo.needs_pass) == (True, True, True)
    assert [one.kind for one in ObjectiveConfig(preset="tis", corrections=["icepop"]).corrections] == ["icepop"]


def test_the_default_is_areal_with_masked_weights() -> None:
    assert ObjectiveConfig() == ObjectiveConfig(preset="areal", behaviour_cap_mode="mask")


def test_explicit_keys_win_over_the_preset() -> None:
    objective = ObjectiveConfig(preset="gspo", advantage="rloo", clip_high=0.01)
    assert (objective.advantage, objective.clip_low, objective.clip_high) == ("rloo", 3e-4, 0.01)


def test_a_loss_that_differs_from_the_presets_brings_its_own_defaults() -> None:
    assert shown(ObjectiveConfig(loss="gspo"))[1:6] == ("seq_mean_token_mean", "gspo", "behaviour", 3e-4, 4e-4)
    assert ObjectiveConfig(loss="ppo_clip").prox == "behaviour"


@pytest.mark.parametrize("preset", PRESETS)
def test_the_resolved_copy_shows_every_value_and_reads_back_equal(preset: str) -> None:
    config = run_with({"preset": preset, "corrections": ["geo_rs", {"kind": "opsm", "limit": 0.1}]})
    text = dump(config)
    assert f"loss: {config.trainer.objective.loss}" in text
    assert "high: 1.002" in text
    assert ObjectiveConfig.model_validate(config.trainer.objective.model_dump(mode="json")) == config.trainer.objective


@pytest.mark.parametrize("loss", LOSSES)
def test_every_choice_of_the_code_is_a_choice_of_the_configuration(loss: str) -> None:
    for advantage, estimator in product(ADVANTAGES, ESTIMATORS):
        objective = ObjectiveConfig(advantage=advantage, loss=loss, kl_estimator=estimator)
        assert (objective.loss, objective.advantage, objective.kl_estimator) == (loss, advantage, estimator)
    assert {ObjectiveConfig(loss="ppo_clip", prox=prox).prox for prox in PROXIMALS} == {*PROXIMALS}


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_correction_is_named_alone_and_gets_its_defaults(kind: str) -> None:
    (correction,) = ObjectiveConfig(loss="ppo_clip", prox="recompute", corrections=[kind]).corrections
    assert any(dial is not None for dial in (correction.cap, correction.low, correction.high, correction.limit))


@pytest.mark.parametrize(
    ("objective", "says"),
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
def test_what_cannot_be_is_refused_with_the_reason_and_the_fix(objective: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refusal:
        run_with(objective)
    assert "trainer.objective" in str(refusal.value)


@pytest.mark.parametrize("kind", ["seq_mis", "geo_rs", "m2po", "opsm", "ess_lr"])
@pytest.mark.parametrize("preset", PRESETS)
def test_what_only_rejects_or_scales_the_step_goes_with_every_preset(preset: str, kind: str) -> None:
    assert run_with({"preset": preset, "corrections": [kind]}).trainer.objective.corrections[0].kind == kind


def test_a_line_shows_the_resolved_values() -> None:
    assert ObjectiveConfig(corrections=["geo_rs"]).summary == (
        "areal: grpo advantages, decoupled (prox recompute, clip_low 0.2, clip_high 0.28, behaviour_cap 5, "
        "behaviour_cap_mode mask) + geo_rs, token_mean"
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
def test_tokens_of_an_engine_of_8_bit_matrices_are_weighed_unless_they_are_already(
    quantization: str, objective: dict[str, Any], corrections: list[str]
) -> None:
    raw: dict[str, Any] = {"name": "test", "model": {"random": {}}, "trainer": {"objective": objective}}
    plain = validate(raw, "test.yaml").trainer.objective
    config = validate(raw | {"rollout": {"vllm": {"quantization": quantization}}}, "test.yaml")
    assert [each.kind for each in config.trainer.objective.corrections] == corrections
    if corrections != ["token_tis"]:
        assert config.trainer.objective == plain
    assert validate(yaml.safe_load(dump(config)), "resolved.yaml") == config


@pytest.mark.parametrize(
    ("vllm", "model", "said"),
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
def test_what_8_bit_matrices_do_not_go_with_is_refused(vllm: Any, model: Any, said: str) -> None:
    raw = {"name": "test", "model": {"random": {}, **model}, "rollout": {"vllm": vllm}}
    with pytest.raises(ConfigError, match=said):
        validate(raw, "test.yaml")


def test_sequences_shared_by_ranks_are_refused_in_float32_on_a_gpu() -> None:
    trainer = {"platform": "cuda", "processes": 2, "context_parallel": 2}
    raw: dict[str, Any] = {"name": "test", "model": {"random": {}, "precision": "float32"}, "trainer": trainer}
    with pytest.raises(ConfigError, match=r"trainer\.context_parallel is 2.*model\.precision"):
        validate(raw, "test.yaml")
    raw["model"]["precision"] = "bfloat16"
    assert validate(raw, "test.yaml").trainer.context_parallel == 2
