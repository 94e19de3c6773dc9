"""Objectives on a GPU: values and gradients as in float64 on the CPU, and whole steps as in plain torch."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from async_grpo.algorithms import Tokens, token_objective
from async_grpo.config.objective import ObjectiveConfig
from tests.integration.trainer.test_trainer_objectives import (
    DEALT_OUT,
    FAMILY,
    OBJECTIVES,
    WHOLE,
    assert_plain_step,
    run_of,
)
from tests.support.objective_cases import random_rows, tokens_of, weights_of
from tests.support.trainer_programs.launching import Outcome, run_all
from tests.support.trainer_programs.models import make_model


def on_gpu(tokens: Tokens, dtype: torch.dtype) -> Tokens:
    """The same batch there; `logprobs_N` is a leaf again."""
    moved = {field.name: getattr(tokens, field.name) for field in fields(tokens)}
    moved = {
        name: value.detach().to("cuda", dtype if value.is_floating_point() else value.dtype)
        for name, value in moved.items()
        if isinstance(value, torch.Tensor)
    }
    return replace(tokens, **moved | {"logprobs_N": moved["logprobs_N"].requires_grad_()})


def value_and_gradient(
    tokens: Tokens, weights_N: torch.Tensor, objective: ObjectiveConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    found = token_objective(tokens, objective)
    (found.loss_N * weights_N).sum().backward()
    assert tokens.logprobs_N.grad is not None
    return found.loss_N.detach().cpu().double(), tokens.logprobs_N.grad.cpu().double()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", [name for name in OBJECTIVES if "entropy" not in name])
def test_value_and_gradient_are_those_of_float64_on_the_cpu(name: str, dtype: torch.dtype, tolerance: float) -> None:
    objective = ObjectiveConfig.model_validate(OBJECTIVES[name])
    rows = random_rows(7)
    expected = value_and_gradient(tokens_of(rows), weights_of(rows), objective)
    found = value_and_gradient(on_gpu(tokens_of(rows), dtype), weights_of(rows).to("cuda", dtype), objective)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("objectives"), FAMILY)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Outcome]:
    """One step of the trainer on the GPU for every kind of objective."""
    folder = tmp_path_factory.mktemp("steps")
    runs = {name: run_of(model, name, WHOLE, platform="cuda") for name in OBJECTIVES}
    return run_all({folder: runs}, ranks=1)[folder]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_step_equals_plain_torch(steps: dict[str, Outcome], model: Path, name: str) -> None:
    assert name in DEALT_OUT or steps[name].step["micro_batches"] == 1
    assert_plain_step(steps[name], model, OBJECTIVES[name])
