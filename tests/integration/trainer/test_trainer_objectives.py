"""Every kind of objective in the real trainer: as in plain torch, and the same however the batch is cut and dealt out.

The reference runs the Hugging Face model in float64, one sequence at a time, and applies the per-token functions to the
whole batch at once. Their formulas are proved in tests/unit; here it is about what the trainer feeds them: segments,
versions, masks, entropies, the pass before the step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from async_grpo.algorithms import ess_scale, ess_sums, token_objective
from async_grpo.config.objective import ObjectiveConfig
from tests.support.trainer_programs.launching import (
    AGED,
    KINDS,
    OBJECTIVES,
    Outcome,
    Run,
    assert_same_figures,
    assert_same_moves,
    assert_same_step,
)
from tests.support.trainer_programs.models import make_model
from tests.support.trainer_programs.plain import load, minus_gradient, plain_tokens

FAMILY = "qwen2-even"
CUT, WHOLE = 40, 1000
"""Tokens of a micro-batch: one or two sequences, or all of them."""

REPETITION_PENALTY = 1.3
TRUNCATED = {"preset": "grpo", "entropy_coef": 0.1}
"""Objective of the steps on truncated samples; the entropy is over the kept tokens, too."""
DEALT_OUT = ["gspo", "m2po", "vcpo", "ess_lr and entropy", "weight and reject"]
"""Those that see sequences, the whole batch, the weights of samples, and versions and entropies."""


def run_of(model: Path, name: str, micro_batch_tokens: int, **trainer: Any) -> Run:
    return Run(model, {"micro_batch_tokens": micro_batch_tokens, "objective": OBJECTIVES[name], **trainer}, AGED)


def runs(folder: Path) -> dict[int, dict[str, Run]]:
    """`NAME` in one micro-batch, `NAME, cut` in many, `NAME, KIND` for each kind of parallelism."""
    model = make_model(folder, FAMILY)
    whole = {name: run_of(model, name, WHOLE) for name in OBJECTIVES}
    cut = {f"{name}, cut": run_of(model, name, CUT) for name in DEALT_OUT}
    dealt = {
        f"{name}, {kind}": run_of(model, name, CUT, **layout) for name in DEALT_OUT for kind, layout in KINDS.items()
    }
    truncated = {
        "truncated": truncated_run(model, WHOLE),
        "truncated, cut": truncated_run(model, CUT),
    }
    truncated_ranks = {f"truncated, {kind}": truncated_run(model, CUT, **layout) for kind, layout in KINDS.items()}
    return {1: whole | cut | truncated, 2: dealt | truncated_ranks}


def truncated_run(model: Path, micro_batch_tokens: int, **trainer: Any) -> Run:
    keys = {"micro_batch_tokens": micro_batch_tokens, "objective": TRUNCATED, **trainer}
    sampling = {"top_k": 9, "repetition_penalty": REPETITION_PENALTY}
    return Run(model, keys, AGED | {"truncated": True}, sampling=sampling)


def assert_plain_step(
    found: Outcome, model_folder: Path, keys: dict[str, Any], repetition_penalty: float | None = None
) -> None:
    """The step is the one of plain torch, on the whole batch at once."""
    objective, model = ObjectiveConfig.model_validate(keys), load(model_folder).double()
    tokens, weights_N = plain_tokens(model, objective, repetition_penalty=repetition_penalty)
    expected = token_objective(tokens, objective)
    loss = (expected.loss_N * weights_N).sum()
    loss.backward()
    scale = ess_scale(*ess_sums(tokens.detached()).tolist()) if objective.scales_learning_rate else 1.0
    moved = minus_gradient(model)
    grad_norm = torch.stack([gradient.square().sum() for gradient in moved.values()]).sum().sqrt().item()
    assert grad_norm > 1e-3
    assert tokens.entropy_N is not None
    figures = {
        "loss": loss.item(),
        "grad_norm": grad_norm,
        "clip_fraction": expected.clipped_N.double().mean().item(),
        "rejected_fraction": expected.rejected_N.double().mean().item(),
        "lr_scale": scale,
        "trained_tokens": len(weights_N),
        "entropy": tokens.entropy_N.mean().item() if objective.entropy_coef > 0 else None,
    }
    assert_same_figures(found.step, figures, 1e-4)
    assert_same_moves(found, {key: scale * tensor for key, tensor in moved.items()}, 1e-4)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_step_equals_plain_torch(one_rank: dict[str, Outcome], folder: Path, name: str) -> None:
    assert_plain_step(one_rank[name], make_model(folder, FAMILY), OBJECTIVES[name])


def test_a_step_on_truncated_samples_normalises_over_the_kept_tokens(
    one_rank: dict[str, Outcome], two_ranks: dict[str, Outcome], folder: Path
) -> None:
    """Also with a repetition penalty, in many micro-batches, and where ranks have slices of the vocabulary."""
    assert_plain_step(one_rank["truncated"], make_model(folder, FAMILY), TRUNCATED, REPETITION_PENALTY)
    assert_same_step(one_rank["truncated, cut"], one_rank["truncated"], 2e-5)
    for kind in KINDS:
        assert_same_step(two_ranks[f"truncated, {kind}"], one_rank["truncated"], 2e-5)


@pytest.mark.parametrize("name", DEALT_OUT)
def test_the_number_of_micro_batches_changes_nothing(one_rank: dict[str, Outcome], name: str) -> None:
    assert one_rank[name].step["micro_batches"] == 1
    assert one_rank[f"{name}, cut"].step["micro_batches"] > 5
    assert_same_step(one_rank[f"{name}, cut"], one_rank[name], 2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DEALT_OUT)
def test_two_ranks_of_any_kind_take_the_same_step(
    one_rank: dict[str, Outcome], two_ranks: dict[str, Outcome], name: str, kind: str
) -> None:
    assert_same_step(two_ranks[f"{name}, {kind}"], one_rank[name], 2e-5)


def test_the_cases_exercise_what_they_are_for(one_rank: dict[str, Outcome]) -> None:
    clipped = [name for name in OBJECTIVES if one_rank[name].step["clip_fraction"] > 0]
    assert {"grpo", "gspo", "cispo", "gmpo", "dppo_tv", "topr", "loglinear", "m2po"} <= {*clipped}
    rejecting = [name for name in OBJECTIVES if one_rank[name].step["rejected_fraction"] > 0]
    assert {"corrected", "m2po", "weight and reject"} <= {*rejecting}
    assert 0 < one_rank["ess_lr and entropy"].step["lr_scale"] < 0.99
