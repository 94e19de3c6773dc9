"""Every kind of objective in the real trainer: as in plain torch, and the same however the batch is cut and dealt out.

The reference runs the Hugging Face model in float64, one sequence at a time, and applies the per-token functions to the
whole batch at once. Their formulas are proved in tests/unit; here it is about what the trainer feeds them: segments,
versions, masks, entropies, the pass before the step.

Adam with a huge eps and a learning rate as huge is plain gradient descent: each weight moves by minus its gradient.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config

from async_grpo.algorithms import ess_scale, ess_sums, token_objective, whole_batch_multiplier
from async_grpo.config import RunConfig, dump, validate
from async_grpo.config.objective import ObjectiveConfig
from tests.support.trainer_programs.aged_batch import LONGEST
from tests.support.trainer_programs.batches import VOCAB
from tests.support.trainer_programs.launching import launch
from tests.support.trainer_programs.plain_torch import plain_tokens

TEMPERATURE = 0.8
HUGE = 1e6
CUT, WHOLE = 40, 1000
"""Tokens of a micro-batch: one or two sequences, or all of them."""

OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {"preset": "grpo"},
    "dr_grpo": {"preset": "dr_grpo"},
    "gspo": {"preset": "gspo", "clip_low": 0.05, "clip_high": 0.1},
    "cispo": {"preset": "cispo", "clip_high": 0.3},
    "gmpo": {"loss": "gmpo", "advantage": "lite_ppo"},
    "sapo": {"loss": "sapo", "advantage": "reinforce_pp_baseline", "aggregation": "seq_mean_token_sum"},
    "dppo_tv": {"loss": "dppo_tv", "clip_low": 0.003, "clip_high": 0.003, "advantage": "opo"},
    "topr": {"loss": "topr", "advantage": "rloo"},
    "loglinear": {"prox": "loglinear", "clip_low": 0.1, "clip_high": 0.1, "dual_clip": 1.2},
    "corrected": {
        "loss": "ppo_clip",
        "prox": "recompute",
        "corrections": ["token_tis", {"kind": "seq_mis", "low": 0.005}],
    },
    "m2po": {"preset": "dapo", "corrections": [{"kind": "m2po", "limit": 0.06}, {"kind": "opsm", "limit": 0.05}]},
    "ess_lr and entropy": {"prox": "loglinear", "corrections": ["ess_lr"], "entropy_coef": 0.1},
}
DEALT_OUT = ["gspo", "m2po", "ess_lr and entropy"]
"""Those that see sequences, the whole batch, and versions and entropies."""


@dataclass(frozen=True)
class Outcome:
    figures: dict[str, Any]
    moved: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("objectives")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def one_rank(folder: Path, model: Path) -> dict[str, Outcome]:
    """`NAME` in one micro-batch, `NAME, cut` in many."""
    configs = {name: run_config(name, WHOLE) for name in OBJECTIVES}
    return train(folder, model, configs | {f"{name}, cut": run_config(name, CUT) for name in DEALT_OUT}, ranks=1)


@pytest.fixture(scope="module")
def two_ranks(folder: Path, model: Path) -> dict[str, Outcome]:
    """`NAME, KIND` for each kind of parallelism."""
    sizes = {"data": {}, "tensor": {"tensor_parallel": 2}, "pipeline": {"pipeline_parallel": 2}}
    configs = {
        f"{name}, {kind}": run_config(name, CUT, processes=2, **size)
        for name in DEALT_OUT
        for kind, size in sizes.items()
    }
    return train(folder, model, configs, ranks=2)


def run_config(name: str, micro_batch_tokens: int, **trainer: int) -> RunConfig:
    raw: dict[str, Any] = {
        "name": "objectives",
        "model": {"random": {}},
        "sampling": {"temperature": TEMPERATURE, "max_tokens": LONGEST},
        "rollout": {"vllm": {"max_model_len": CUT}},
        "trainer": {
            "micro_batch_tokens": micro_batch_tokens,
            "optimizer": {"lr": HUGE, "eps": HUGE, "clip_grad": HUGE, "beta1": 0.0},
            "objective": OBJECTIVES[name],
            **trainer,
        },
    }
    return validate(raw, "test")


def train(folder: Path, model: Path, configs: dict[str, RunConfig], ranks: int) -> dict[str, Outcome]:
    """All in one start of the processes, which is most of the time."""
    outs = {name: folder / f"{ranks}-{number}.json" for number, name in enumerate(configs)}
    for name, config in configs.items():
        outs[name].with_suffix(".yaml").write_text(dump(config))
    cases = [{"config": str(out.with_suffix(".yaml")), "model": str(model), "out": str(out)} for out in outs.values()]
    listed = folder / f"cases-{ranks}.json"
    listed.write_text(json.dumps(cases))
    launch("objective_steps", ranks, listed)
    return {
        name: Outcome(json.loads(out.read_text()), load_file(out.with_suffix(".safetensors")))
        for name, out in outs.items()
    }


def reference(model_folder: Path, objective: ObjectiveConfig) -> Outcome:
    """The step in plain torch, on the whole batch at once."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager").double()
    tokens, weights_N = plain_tokens(model, objective, temperature=TEMPERATURE)
    found = token_objective(tokens, objective, whole_batch_multiplier(tokens, objective))
    loss = (found.loss_N * weights_N).sum()
    loss.backward()
    scale = ess_scale(*ess_sums(tokens.detached()).tolist()) if objective.scales_step else 1.0
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert tokens.entropy_N is not None
    figures = {
        "loss": loss.item(),
        "grad_norm": torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt().item(),
        "clip_fraction": found.clipped_N.double().mean().item(),
        "rejected_fraction": found.rejected_N.double().mean().item(),
        "lr_scale": scale,
        "trained_tokens": len(weights_N),
    }
    if objective.entropy_coef > 0:
        figures["entropy"] = tokens.entropy_N.mean().item()
    return Outcome(figures, {name: -scale * gradient for name, gradient in gradients.items()})


def assert_same(found: Outcome, expected: Outcome, tolerance: float) -> None:
    measured = {key: value for key, value in expected.figures.items() if value is not None}
    for key in measured.keys() - {"micro_batches", "packing_efficiency", "rank_balance"}:
        assert found.figures[key] == pytest.approx(measured[key], rel=tolerance, abs=tolerance), key
    size = max(tensor.abs().max().item() for tensor in expected.moved.values())
    assert found.moved.keys() == expected.moved.keys()
    for name, tensor in found.moved.items():
        difference = (tensor - expected.moved[name]).abs().max().item()
        assert difference <= tolerance * size, f"{name} differs by {difference:.2e} of {size:.2e}"


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_step_equals_plain_torch(one_rank: dict[str, Outcome], model: Path, name: str) -> None:
    expected = reference(model, run_config(name, WHOLE).trainer.objective)
    assert expected.figures["grad_norm"] > 1e-3
    assert_same(one_rank[name], expected, 1e-4)


@pytest.mark.parametrize("name", DEALT_OUT)
def test_the_number_of_micro_batches_changes_nothing(one_rank: dict[str, Outcome], name: str) -> None:
    assert one_rank[name].figures["micro_batches"] == 1
    assert one_rank[f"{name}, cut"].figures["micro_batches"] > 5
    assert_same(one_rank[f"{name}, cut"], one_rank[name], 2e-5)


@pytest.mark.parametrize("kind", ["data", "tensor", "pipeline"])
@pytest.mark.parametrize("name", DEALT_OUT)
def test_two_ranks_of_any_kind_take_the_same_step(
    one_rank: dict[str, Outcome], two_ranks: dict[str, Outcome], name: str, kind: str
) -> None:
    assert_same(two_ranks[f"{name}, {kind}"], one_rank[name], 2e-5)


def test_the_cases_exercise_what_they_are_for(one_rank: dict[str, Outcome]) -> None:
    clipped = [name for name in OBJECTIVES if one_rank[name].figures["clip_fraction"] > 0]
    assert {"grpo", "gspo", "cispo", "gmpo", "dppo_tv", "topr", "loglinear", "m2po"} <= {*clipped}
    assert [name for name in OBJECTIVES if one_rank[name].figures["rejected_fraction"] > 0] == ["corrected", "m2po"]
    assert 0 < one_rank["ess_lr and entropy"].figures["lr_scale"] < 0.99
