"""The reference model: the divergence is that of plain torch, its weights leave no trace, and it survives a resume.

The expected numbers come from two Hugging Face models in float64 and from the formulas of the divergence written out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from async_grpo.algorithms import token_objective
from async_grpo.config.objective import ObjectiveConfig
from tests.support.trainer_programs.aged_batch import VERSION
from tests.support.trainer_programs.models import make_model
from tests.support.trainer_programs.plain_torch import plain_tokens, reference_logprobs
from tests.support.trainer_programs.updates import (
    TEMPERATURE,
    Outcome,
    Run,
    assert_same_figures,
    assert_same_weights,
    make_other,
    run_all,
)

BETA = 0.3
AGED = {"aged": True, "versions": [VERSION]}
ESTIMATORS = ["k1", "k2", "k3", "k3+"]
STEPS, SAVED, SYNC = 7, 4, 3
"""Saved at version 4, when the reference is that of version 3."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reference")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return make_model(folder, "qwen2-untied")


@pytest.fixture(scope="module")
def other(folder: Path, model: Path) -> Path:
    return make_other(model, folder / "other")


def divergence(other: Path, estimator: str, where: str, placement: str = "swap") -> Run:
    trainer = {
        "objective": {"kl_beta": BETA, "kl_estimator": estimator, "kl_in": where},
        "reference": {"source": "frozen", "path": str(other), "placement": placement},
    }
    return Run(trainer, AGED)


def synced(folder: str, first: int = 0, placement: str = "swap", **case: Any) -> Run:
    trainer = {
        "optimizer": {"lr": 1e-2},
        "objective": {"kl_beta": BETA},
        "reference": {"source": "synced", "sync_every": SYNC, "placement": placement},
    }
    return Run(trainer, {"versions": [*range(first, STEPS)], **case}, folder=folder)


@pytest.fixture(scope="module")
def one_rank(folder: Path, model: Path, other: Path) -> dict[str, Outcome]:
    frozen = {"reference": {"source": "frozen", "path": str(other)}}
    runs = {
        **{f"{estimator} in loss": divergence(other, estimator, "loss") for estimator in ESTIMATORS},
        **{f"{estimator} in reward": divergence(other, estimator, "reward") for estimator in ("k1", "k3+")},
        "second model": divergence(other, "k3", "loss", "model"),
        "measured only": Run(frozen, AGED),
        "swap float32": Run(frozen, {"swap": True}),
        "swap bfloat16": Run(frozen, {"swap": True}, precision="bfloat16"),
        "synced": synced("synced", save_at=SAVED),
        "synced, resumed": synced("synced", first=SAVED, resume=True),
        "synced, second model, resumed": synced("synced", first=SAVED, placement="model", resume=True),
    }
    return run_all(folder, model, runs, ranks=1)


@pytest.fixture(scope="module")
def two_ranks(folder: Path, model: Path, other: Path, one_rank: dict[str, Outcome]) -> dict[str, Outcome]:
    sizes = {"data": {}, "tensor": {"tensor_parallel": 2}, "pipeline": {"pipeline_parallel": 2}}
    what = {
        "loss": Run(divergence(other, "k3+", "loss").trainer, {**AGED, "swap": True}),
        "second model": divergence(other, "k3", "loss", "model"),
        "resumed": synced("synced", first=SAVED, resume=True),
    }
    runs = {"reward, data": divergence(other, "k3+", "reward")}
    runs |= {f"{name}, {kind}": run for name, run in what.items() for kind in sizes}
    runs = {
        name: Run({**run.trainer, **sizes[name.split(", ")[1]]}, run.case, run.folder) for name, run in runs.items()
    }
    return run_all(folder, model, runs, ranks=2)


def formula(estimator: str, d_N: Tensor) -> Tensor:
    """Value and gradient of the divergence at each token."""
    k2_N, k3_N = d_N * d_N / 2, torch.exp(-d_N) - 1 + d_N
    return {"k1": d_N, "k2": k2_N, "k3": k3_N, "k3+": k3_N.detach() + k2_N - k2_N.detach()}[estimator]


def plain_step(model: Path, other: Path, estimator: str, where: str) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The figures and minus the gradient, in float64."""
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double() for path in (model, other)
    )

    def penalty(group: Any, sample: Any, trained: Tensor) -> float:
        behaviour = torch.tensor(sample.token_logprobs().copy()).double()
        d_C = behaviour - reference_logprobs(reference, group, sample, TEMPERATURE)
        return BETA * float(formula(estimator, d_C)[trained].sum())

    objective = ObjectiveConfig()
    tokens, weights_N = plain_tokens(
        policy,
        objective,
        temperature=TEMPERATURE,
        reference=reference,
        penalty=penalty if where == "reward" else None,
    )
    assert tokens.reference_N is not None
    divergence_N = formula(estimator, tokens.logprobs_N - tokens.reference_N)
    loss_N = token_objective(tokens, objective).loss_N
    loss = ((loss_N + BETA * divergence_N if where == "loss" else loss_N) * weights_N).sum()
    loss.backward()
    figures = {"loss": loss.item(), "kl": divergence_N.mean().item()}
    return figures, {name: -parameter.grad for name, parameter in policy.named_parameters()}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_divergence_in_the_loss_has_the_value_and_the_gradient_of_plain_torch(
    one_rank: dict[str, Outcome], model: Path, other: Path, estimator: str
) -> None:
    figures, moved = plain_step(model, other, estimator, "loss")
    found = one_rank[f"{estimator} in loss"]
    assert_same_figures(found.step, figures, 1e-5)
    assert_same_weights(found.moved, moved, 1e-4)


@pytest.mark.parametrize("estimator", ["k1", "k3+"])
def test_a_divergence_in_the_reward_changes_the_advantages_as_plain_torch_does(
    one_rank: dict[str, Outcome], model: Path, other: Path, estimator: str
) -> None:
    figures, moved = plain_step(model, other, estimator, "reward")
    found = one_rank[f"{estimator} in reward"]
    assert_same_figures(found.step, figures, 1e-5)
    assert_same_weights(found.moved, moved, 1e-4)


def test_a_second_model_and_exchanged_weights_give_the_same_step(one_rank: dict[str, Outcome]) -> None:
    assert_same_figures(one_rank["second model"].step, one_rank["k3 in loss"].step, 1e-6)
    assert_same_weights(one_rank["second model"].moved, one_rank["k3 in loss"].moved, 1e-6)


def test_a_reference_without_a_weight_is_measured_and_changes_nothing(one_rank: dict[str, Outcome]) -> None:
    measured = one_rank["measured only"].step
    assert measured["kl"] == pytest.approx(one_rank["k3+ in loss"].step["kl"], rel=1e-6)
    assert measured["loss"] != pytest.approx(one_rank["k3+ in loss"].step["loss"], rel=1e-2)


@pytest.mark.parametrize(
    ("name", "alone", "kind"),
    [
        ("reward", "k3+ in reward", "data"),
        *(("loss", "k3+ in loss", kind) for kind in ("data", "tensor", "pipeline")),
        *(("second model", "k3 in loss", kind) for kind in ("data", "tensor", "pipeline")),
    ],
)
def test_two_ranks_of_any_kind_diverge_as_one(
    one_rank: dict[str, Outcome], two_ranks: dict[str, Outcome], name: str, alone: str, kind: str
) -> None:
    assert_same_figures(two_ranks[f"{name}, {kind}"].step, one_rank[alone].step, 2e-5)
    assert_same_weights(two_ranks[f"{name}, {kind}"].moved, one_rank[alone].moved, 2e-5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_weights_masters_and_moments_come_back_bit_for_bit(one_rank: dict[str, Outcome], precision: str) -> None:
    found = one_rank[f"swap {precision}"].found["swap"]
    assert found["back"]
    assert found["others"] > 20
    assert found["compared"] > 60


@pytest.mark.parametrize("kind", ["data", "tensor", "pipeline"])
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


@pytest.mark.parametrize("kind", ["data", "tensor", "pipeline"])
def test_it_survives_a_resume_on_other_ranks(
    one_rank: dict[str, Outcome], two_ranks: dict[str, Outcome], kind: str
) -> None:
    for found, expected in zip(two_ranks[f"resumed, {kind}"].steps, one_rank["synced"].steps[SAVED:], strict=True):
        assert_same_figures(found, expected, 1e-4)
