"""Objectives on a GPU: values and gradients as in float64 on the CPU, and whole steps as in plain torch."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from async_grpo.algorithms import Tokens, token_objective, whole_batch_multiplier
from async_grpo.config.objective import ObjectiveConfig
from tests.integration.trainer.test_trainer_objectives import (
    DEALT_OUT,
    OBJECTIVES,
    WHOLE,
    Outcome,
    assert_same,
    reference,
    run_config,
    train,
)
from tests.support.objective_cases import random_rows, tokens_of, weights_of
from tests.support.trainer_programs.batches import VOCAB


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
    found = token_objective(tokens, objective, whole_batch_multiplier(tokens, objective))
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
    path = tmp_path_factory.mktemp("objectives") / "model"
    AutoModelForCausalLM.from_config(config).float().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Outcome]:
    """One step of the trainer on the GPU for every kind of objective."""
    configs = {name: run_config(name, WHOLE) for name in OBJECTIVES}
    on_cuda = {
        name: config.model_copy(update={"trainer": config.trainer.model_copy(update={"platform": "cuda"})})
        for name, config in configs.items()
    }
    return train(tmp_path_factory.mktemp("steps"), model, on_cuda, ranks=1)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_step_equals_plain_torch(steps: dict[str, Outcome], model: Path, name: str) -> None:
    assert name in DEALT_OUT or steps[name].figures["micro_batches"] == 1
    assert_same(steps[name], reference(model, run_config(name, WHOLE).trainer.objective), 1e-4)
