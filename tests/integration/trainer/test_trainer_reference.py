"""The reference model: the divergence is that of plain torch, its weights leave no trace, and it survives a resume.

The expected numbers come from two Hugging Face models in float64 and from the formulas of the divergence written out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from async_grpo.algorithms import token_objective
from async_grpo.config.objective import ObjectiveConfig
from tests.support.trainer_programs.launching import (
    AGED,
    KINDS,
    Outcome,
    Run,
    assert_same_figures,
    assert_same_moves,
    assert_same_step,
)
from tests.support.trainer_programs.models import make_model, make_other, make_other_options
from tests.support.trainer_programs.plain import load, minus_gradient, plain_tokens, reference_logprobs

FAMILY = "qwen2-untied"
BETA = 0.3
ESTIMATORS = ["k1", "k2", "k3", "k3+"]
STEPS, SAVED, SYNC = 7, 4, 3
"""Saved at version 4, when the reference is that of version 3."""


def runs(folder: Path) -> dict[int, dict[str, Run]]:
    model = make_model(folder, FAMILY)
    frozen = {"source": "frozen", "path": str(make_other(model))}

    options = {"source": "frozen", "path": str(make_other_options(model)), "placement": "model"}

    def diverging(estimator: str, where: str, placement: str = "swap", swap: bool = False, **layout: int) -> Run:
        objective = {"kl_beta": BETA, "kl_estimator": estimator, "kl_in": where}
        trainer = {"objective": objective, "reference": {**frozen, "placement": placement}, **layout}
        return Run(model, trainer, {**AGED, "swap": swap})

    def synced(first: int, placement: str = "swap", **layout: int) -> Run:
        trainer = {
            "optimizer": {"lr": 1e-2},
            "objective": {"kl_beta": BETA},
            "reference": {"source": "synced", "sync_every": SYNC, "placement": placement},
        }
        case = {"resume": True} if first else {"save_at": SAVED}
        return Run(model, trainer | layout, {"versions": [*range(first, STEPS)], **case}, "synced" if first else "")

    one = {
        **{f"{estimator} in loss": diverging(estimator, "loss") for estimator in ESTIMATORS},
        **{f"{estimator} in reward": diverging(estimator, "reward") for estimator in ("k1", "k3+")},
        "second model": diverging("k3", "loss", "model"),
        "other options": Run(model, {"objective": {"kl_beta": BETA, "kl_estimator": "k3"}, "reference": options}, AGED),
        "measured only": Run(model, {"reference": frozen}, AGED),
        "swap float32": Run(model, {"reference": frozen}, {"swap": True}),
        "swap bfloat16": Run(model, {"reference": frozen}, {"swap": True}, precision="bfloat16"),
        "synced": synced(0),
        "synced, resumed": synced(SAVED),
        "synced, second model, resumed": synced(SAVED, "model"),
    }
    two = {"reward, data": diverging("k3+", "reward")}
    for kind, layout in KINDS.items():
        two[f"loss, {kind}"] = diverging("k3+", "loss", swap=True, **layout)
        two[f"second model, {kind}"] = diverging("k3", "loss", "model", **layout)
        two[f"resumed, {kind}"] = synced(SAVED, **layout)
    return {1: one, 2: two}


def formula(estimator: str, d_N: Tensor) -> Tensor:
    """Value and gradient of the divergence at each token."""
    k2_N, k3_N = d_N * d_N / 2, torch.exp(-d_N) - 1 + d_N
    return {"k1": d_N, "k2": k2_N, "k3": k3_N, "k3+": k3_N.detach() + k2_N - k2_N.detach()}[estimator]


def plain_step(
    model: Path, estimator: str, where: str, other: Path | None = None
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The figures and minus the gradient, in float64."""
    policy, reference = (load(path).double() for path in (model, other or make_other(model)))

    def penalty(group: Any, sample: Any, trained: Tensor) -> float:
        behaviour = torch.tensor(sample.token_logprobs().copy()).double()
        d_C = behaviour - reference_logprobs(reference, group, sample)
        return BETA * float(formula(estimator, d_C)[trained].sum())

    objective = ObjectiveConfig()
    tokens, weights_N = plain_tokens(
        policy, objective, reference=reference, penalty=penalty if where == "reward" else None
    )
    assert tokens.reference_N is not None
    divergence_N = formula(estimator, tokens.logprobs_N - tokens.reference_N)
    loss_N = token_objective(tokens, objective).loss_N
    loss = ((loss_N + BETA * divergence_N if where == "loss" else loss_N) * weights_N).sum()
    loss.backward()
    return {"loss": loss.item(), "kl": divergence_N.mean().item()}, minus_gradient(policy)


@pytest.mark.parametrize(
    ("estimator", "where"), [*((name, "loss") for name in ESTIMATORS), ("k1", "reward"), ("k3+", "reward")]
)
def test_a_divergence_in_the_loss_or_the_reward_has_the_value_and_the_gradient_of_plain_torch(
    one_rank: dict[str, Outcome], folder: Path, estimator: str, where: str
) -> None:
    figures, moved = plain_step(make_model(folder, FAMILY), estimator, where)
    found = one_rank[f"{estimator} in {where}"]
    assert_same_figures(found.step, figures, 1e-5)
    assert_same_moves(found, moved, 1e-4)


def test_a_second_model_and_exchanged_weights_give_the_same_step(one_rank: dict[str, Outcome]) -> None:
    assert_same_step(one_rank["second model"], one_rank["k3 in loss"], 1e-6)


def test_a_second_model_with_another_rope_theta_and_epsilon_is_computed_as_what_it_is(
    one_rank: dict[str, Outcome], folder: Path
) -> None:
    model = make_model(folder, FAMILY)
    figures, moved = plain_step(model, "k3", "loss", make_other_options(model))
    assert figures["kl"] != pytest.approx(one_rank["second model"].step["kl"], rel=1e-2)
    assert_same_figures(one_rank["other options"].step, figures, 1e-5)
    assert_same_moves(one_rank["other options"], moved, 1e-4)


def test_a_reference_without_a_weight_is_measured_and_changes_nothing(one_rank: dict[str, Outcome]) -> None:
    measured = one_rank["measured only"].step
    assert measured["kl"] == pytest.approx(one_rank["k3+ in loss"].step["kl"], rel=1e-6)
    assert measured["loss"] != pytest.approx(one_rank["k3+ in loss"].step["loss"], rel=1e-2)


@pytest.mark.parametrize(
    ("name", "alone", "kind"),
    [
        ("reward", "k3+ in reward", "data"),
        *(("loss", "k3+ in loss", kind) for kind in KINDS),
        *(("second model", "k3 in loss", kind) for kind in KINDS),
    ],
)
def test_two_ranks_of_any_kind_diverge_as_one(
    one_rank: dict[str, Outcome], two_ranks: dict[str, Outcome], name: str, alone: str, kind: str
) -> None:
    assert_same_step(two_ranks[f"{name}, {kind}"], one_rank[alone], 2e-5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_weights_masters_and_moments_come_back_bit_for_bit(one_rank: dict[str, Outcome], precision: str) -> None:
    found = one_rank[f"swap {precision}"].found["swap"]
    assert found["back"]
    assert found["others"] > 20
    assert found["compared"] > 60


@pytest.mark.parametrize("kind", KINDS)
def test_they_come_back_on_two_ranks_too(two_ranks: dict[str, Outcome], kind: str) -> None:
    assert two_ranks[f"loss, {kind}"].found["swap"]["back"]


def test_a_synced_reference_is_met_again_every_few_steps(one_rank: dict[str, Outcome]) -> None:
    divergences = [step["kl"] for step in one_rank["synced"].steps]
    assert [version for version, kl in enumerate(divergences) if kl < 1e-9] == [0, 3, 6]
    assert min(kl for version, kl in enumerate(divergences) if version % SYNC) > 1e-6


@pytest.mark.parametrize("name", ["synced, resumed", "synced, second model, resumed"])
def test_a_synced_reference_survives_a_resume(one_rank: dict[str, Outcome], name: str) -> None:
    resumed, whole = one_rank[name].steps, one_rank["synced"].steps[SAVED:]
    assert len(resumed) == len(whole)
    for found, expected in zip(resumed, whole, strict=True):
        assert_same_figures(found, expected, 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_it_survives_a_resume_on_other_ranks(
    one_rank: dict[str, Outcome], two_ranks: dict[str, Outcome], kind: str
) -> None:
    for found, expected in zip(two_ranks[f"resumed, {kind}"].steps, one_rank["synced"].steps[SAVED:], strict=True):
        assert_same_figures(found, expected, 1e-4)
