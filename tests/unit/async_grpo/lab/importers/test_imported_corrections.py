"""Imported corrections against the formulas of the systems that they come from, in plain Python."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from async_grpo.algorithms.corrections import CORRECTIONS
from async_grpo.algorithms.tokens import Tokens
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.lab.importers import SOURCES
from async_grpo.lab.importers.translation import Imported, import_file

LogRatios = Sequence[Sequence[float]]
"""log rho of each token of each sequence."""
SEEDS = range(3)


def random_ratios(seed: int) -> LogRatios:
    """Sequences of which some leave every bound of these tests, upwards and downwards."""
    generator = random.Random(seed)
    spreads = [0.001, 0.003, 0.02, 0.1, 0.3, 1.0] * 8
    return [
        [generator.gauss(generator.choice((-1, 1)) * spread / 4, spread) for _ in range(generator.randint(1, 9))]
        for spread in spreads
    ]


def multiply_corrections(objective: ObjectiveConfig, ratios: LogRatios) -> list[list[float]]:
    """The product of all corrections for each token, computed by this project."""
    lengths = [len(sequence) for sequence in ratios]
    logprobs_N = torch.tensor([value for sequence in ratios for value in sequence], dtype=torch.float64) - 2.0
    behaviour_N = torch.full_like(logprobs_N, -2.0)
    tokens = Tokens(
        logprobs_N=logprobs_N,
        prox_N=logprobs_N,
        behaviour_N=behaviour_N,
        advantages_N=torch.ones_like(logprobs_N),
        segment_N=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        segments=len(lengths),
    )
    product_N = torch.ones_like(logprobs_N)
    for correction in objective.corrections:
        product_N = product_N * CORRECTIONS[correction.kind](tokens, correction)
    return [part.tolist() for part in product_N.split(lengths)]


def import_verl(folder: Path, settings: str) -> Imported:
    file = folder / "verl.yaml"
    file.write_text(f"data: {{train_batch_size: 8}}\nalgorithm: {{rollout_correction: {{{settings}}}}}\n")
    return import_file(SOURCES["verl"], file, {})


def keep_as_verl(sequence: Sequence[float], option: str, low: float, high: float) -> list[bool]:
    """Tokens that verl keeps: compute_rollout_rejection_mask of verl/trainer/ppo/rollout_corr_helper.py.

    k1 is -log rho, within [log low, log high]; k2 and k3 are at most `high`.
    """
    estimators: dict[str, Callable[[float], float]] = {
        "k1": lambda d: -d,
        "k2": lambda d: 0.5 * d * d,
        "k3": lambda d: math.exp(d) - 1 - d,
    }
    level, _, estimator = option.rpartition("_")
    values = [estimators[estimator](d) for d in sequence]
    if level != "token":
        whole = {"seq_sum": sum(values), "seq_mean": sum(values) / len(values), "seq_max": max(values)}[level]
        values = [whole] * len(values)
    if estimator == "k1":
        return [math.log(low) <= value <= math.log(high) for value in values]
    return [value <= high for value in values]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("option", "threshold", "low", "high"),
    [
        ("token_k1", "0.9_1.4", 0.9, 1.4),
        ("token_k1", "1.5", 1 / 1.5, 1.5),
        ("token_k2", "0.02", 0, 0.02),
        ("token_k3", "0.02", 0, 0.02),
        ("seq_sum_k1", "0.8_3.0", 0.8, 3.0),
        ("seq_sum_k2", "0.05", 0, 0.05),
        ("seq_sum_k3", "0.05", 0, 0.05),
        ("seq_mean_k1", "0.99_1.05", 0.99, 1.05),
        ("seq_mean_k2", "0.01", 0, 0.01),
        ("seq_mean_k3", "0.01", 0, 0.01),
        ("seq_max_k2", "0.02", 0, 0.02),
        ("seq_max_k3", "0.02", 0, 0.02),
    ],
)
def test_verl_rejects_the_same_tokens(
    tmp_path: Path, option: str, threshold: str, low: float, high: float, seed: int
) -> None:
    result = import_verl(tmp_path, f"rollout_rs: {option}, rollout_rs_threshold: '{threshold}'")
    ratios = random_ratios(seed)
    found = multiply_corrections(result.config.trainer.objective, ratios)
    expected = [[float(keep) for keep in keep_as_verl(sequence, option, low, high)] for sequence in ratios]
    assert found == expected
    assert {value for part in expected for value in part} == {0.0, 1.0}


def test_the_bounds_of_verls_k1_are_those_of_the_inverse_ratio(tmp_path: Path) -> None:
    settings = "rollout_rs: seq_mean_k1, rollout_rs_threshold: 0.999_1.002"
    [correction] = import_verl(tmp_path, settings).config.trainer.objective.corrections
    assert correction.kind == "geo_rs"
    assert correction.low == pytest.approx(1 / 1.002, rel=1e-9)
    assert correction.high == pytest.approx(1 / 0.999, rel=1e-9)


def test_a_list_of_rejections_has_a_threshold_for_each_or_one_for_all(tmp_path: Path) -> None:
    ratios = random_ratios(0)
    for threshold, bounds in (("0.6_1.6,2.5", ((0.6, 1.6), (0, 2.5))), ("1.5", ((1 / 1.5, 1.5), (0, 1.5)))):
        settings = f"rollout_rs: 'token_k1, seq_max_k2', rollout_rs_threshold: '{threshold}'"
        result = import_verl(tmp_path, settings)
        expected = [
            [
                float(first and second)
                for first, second in zip(
                    keep_as_verl(sequence, "token_k1", *bounds[0]),
                    keep_as_verl(sequence, "seq_max_k2", *bounds[1]),
                    strict=True,
                )
            ]
            for sequence in ratios
        ]
        assert multiply_corrections(result.config.trainer.objective, ratios) == expected


@pytest.mark.parametrize(
    "settings", ["rollout_rs: token_k3", "rollout_rs: 'token_k1,token_k2,token_k3', rollout_rs_threshold: '1,2'"]
)
def test_rejections_without_their_thresholds_are_not_supported(tmp_path: Path, settings: str) -> None:
    result = import_verl(tmp_path, settings)
    assert "algorithm.rollout_correction.rollout_rs" in {item.key for item in result.left_out}
    assert not result.config.trainer.objective.corrections


def test_unknown_rejections_are_named(tmp_path: Path) -> None:
    result = import_verl(tmp_path, "rollout_rs: 'geometric,token_k3', rollout_rs_threshold: 2.0")
    [item] = result.left_out
    assert "geometric" in item.reason
    assert [correction.estimator for correction in result.config.trainer.objective.corrections] == ["k3"]


def weigh(sequence: Sequence[float], level: str) -> list[float]:
    if level == "token":
        return [math.exp(d) for d in sequence]
    return [math.exp(sum(sequence))] * len(sequence)


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def mask(value: float, low: float, high: float) -> float:
    return value if low <= value <= high else 0.0


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("threshold", "rule", "low"), [("1.2", clamp, 0.0), ("'0.8_1.2'", mask, 0.8)])
def test_weights_of_verl(
    tmp_path: Path, level: str, threshold: str, rule: Callable[[float, float, float], float], low: float
) -> None:
    ratios = random_ratios(1)
    result = import_verl(tmp_path, f"rollout_is: {level}, rollout_is_threshold: {threshold}")
    found = multiply_corrections(result.config.trainer.objective, ratios)
    for part, sequence in zip(found, ratios, strict=True):
        assert part == pytest.approx([rule(value, low, 1.2) for value in weigh(sequence, level)], rel=1e-9)


def test_verl_without_a_threshold_has_no_weights(tmp_path: Path) -> None:
    result = import_verl(tmp_path, "rollout_is: token, rollout_is_threshold: null")
    assert not result.config.trainer.objective.corrections


@pytest.mark.parametrize("low", [None, 0.5])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("mode", "rule"), [("truncate", clamp), ("mask", mask)])
def test_weights_of_trl(
    tmp_path: Path, level: str, mode: str, rule: Callable[[float, float, float], float], low: float | None
) -> None:
    lines = [
        "per_device_train_batch_size: 8",
        f"vllm_importance_sampling_mode: {level}_{mode}",
        "vllm_importance_sampling_clip_max: 1.5",
    ]
    if low is not None:
        lines.append(f"vllm_importance_sampling_clip_min: {low}")
    file = tmp_path / "trl.yaml"
    file.write_text("\n".join(lines))
    ratios = random_ratios(2)
    found = multiply_corrections(import_file(SOURCES["trl"], file, {}).config.trainer.objective, ratios)
    for part, sequence in zip(found, ratios, strict=True):
        assert part == pytest.approx([rule(value, low or 0.0, 1.5) for value in weigh(sequence, level)], rel=1e-9)


@pytest.mark.parametrize(
    ("settings", "advantage", "norm"),
    [
        ("adv_estimator: grpo", "grpo", "none"),
        ("adv_estimator: grpo, norm_adv_by_std_in_grpo: false", "dr_grpo", "none"),
        ("adv_estimator: reinforce_plus_plus", "reinforce_pp", "batch"),
        ("adv_estimator: gdpo", "gdpo", "batch"),
    ],
)
def test_advantages_of_verl(tmp_path: Path, settings: str, advantage: str, norm: str) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text(f"data: {{train_batch_size: 8}}\nalgorithm: {{{settings}}}\n")
    objective = import_file(SOURCES["verl"], file, {}).config.trainer.objective
    assert (objective.advantage, objective.advantage_norm) == (advantage, norm)
