"""The Megatron model trains like plain Hugging Face and torch AdamW, for every family and in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.trainer_programs.launching import Case, Outcome, train
from tests.support.trainer_programs.models import make_model
from tests.support.trainer_programs.plain import plain_training

FAMILIES = ["qwen2", "qwen2-untied", "qwen3", "llama", "llama3", "moe", "moe-unnormed"]
STEPS = 10
SAVED = 4
"""The step whose checkpoint is resumed from."""

TWO: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor": ("qwen2-untied", {"tensor_parallel": 2}),
    "tensor-qk-norm": ("qwen3", {"tensor_parallel": 2}),
    "sequence": ("qwen3", {"tensor_parallel": 2, "sequence_parallel": True}),
    "pipeline": ("qwen2", {"pipeline_parallel": 2}),
    "pipeline-llama": ("llama", {"pipeline_parallel": 2}),
    "data": ("qwen2", {}),
    "context": ("llama3", {"context_parallel": 2}),
    "context-recomputed": ("qwen2-untied", {"context_parallel": 2, "recompute": "full"}),
    "experts": ("moe", {"expert_parallel": 2}),
    "experts-replicated": ("moe-unnormed", {}),
    "experts-on-tensor": ("moe", {"tensor_parallel": 2, "sequence_parallel": True}),
    "experts-and-tensor": ("moe", {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}),
    "experts-in-stages": ("moe", {"pipeline_parallel": 2}),
}
"""Two ranks: the model, and how it is laid out on them."""

FOUR: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor-pipeline": ("qwen3", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "tensor-context": ("qwen2", {"tensor_parallel": 2, "sequence_parallel": True, "context_parallel": 2}),
    "context-pipeline": ("llama3", {"context_parallel": 2, "pipeline_parallel": 2, "recompute": "selective"}),
    "context-data": ("qwen2-untied", {"context_parallel": 2}),
    "context-of-four": ("llama", {"context_parallel": 4}),
    "experts-pipeline": ("moe", {"expert_parallel": 2, "pipeline_parallel": 2}),
    "experts-data": ("moe", {"expert_parallel": 2}),
    "experts-context": ("moe-unnormed", {"expert_parallel": 4, "context_parallel": 2}),
    "experts-tensor": ("moe", {"expert_parallel": 4, "tensor_parallel": 2, "sequence_parallel": True}),
}
"""Four ranks, likewise."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> dict[str, Outcome]:
    """Every family; twice with less memory; again from a checkpoint that the first one left; a NaN reward."""
    qwen2 = make_model(folder, "qwen2")
    cases = [
        *(Case(name, make_model(folder, name), STEPS, save_at=SAVED) for name in FAMILIES),
        Case("recompute-full", qwen2, STEPS, {"recompute": "full"}),
        Case("recompute-selective", make_model(folder, "moe"), STEPS, {"recompute": "selective"}),
        Case("resumed", qwen2, STEPS, run="qwen2", resume=True),
        Case("poisoned", qwen2, STEPS, poisoned=True),
    ]
    return train(folder, cases, ranks=1)


@pytest.fixture(scope="module")
def two_ranks(folder: Path, one_rank: dict[str, Outcome]) -> dict[str, Outcome]:
    """The last two resume from checkpoints of one rank."""
    cases = [Case(name, make_model(folder, model), STEPS, layout) for name, (model, layout) in TWO.items()]
    cases += [
        Case("resharded", make_model(folder, "qwen2"), STEPS, run="qwen2", resume=True),
        Case("resharded-experts", make_model(folder, "moe"), STEPS, {"expert_parallel": 2}, run="moe", resume=True),
    ]
    return train(folder, cases, ranks=2)


@pytest.fixture(scope="module")
def four_ranks(folder: Path) -> dict[str, Outcome]:
    cases = [Case(name, make_model(folder, model), STEPS, layout) for name, (model, layout) in FOUR.items()]
    return train(folder, cases, ranks=4)


def assert_same_training(found: Outcome, expected: Outcome, tolerance: float = 1e-5) -> None:
    for mine, theirs in zip(found.steps, expected.steps[-len(found.steps) :], strict=True):
        assert mine == pytest.approx(theirs, rel=tolerance, abs=tolerance)
    if len(found.steps) == len(expected.steps):  # a resumed one begins later
        assert_close(found.first, expected.first, tolerance)
    assert_close(found.trained, expected.trained, tolerance)


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        difference = (tensor - expected[name]).abs().max().item()
        assert difference <= tolerance, f"{name} differs by {difference:.2e}"


def assert_identical(found: dict[str, torch.Tensor], model: Path) -> None:
    original = load_file(model / "model.safetensors")
    assert found.keys() == original.keys()
    assert all(torch.equal(found[name], original[name]) for name in original)


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probabilities_of_the_packed_batch_equal_hugging_face(
    one_rank: dict[str, Outcome], folder: Path, name: str
) -> None:
    expected = plain_training(make_model(folder, name), STEPS)
    assert sorted(one_rank[name].logprobs) == pytest.approx(sorted(expected.logprobs), abs=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_step_and_ten_equal_hugging_face_and_torch_adamw(
    one_rank: dict[str, Outcome], folder: Path, name: str
) -> None:
    assert_same_training(one_rank[name], plain_training(make_model(folder, name), STEPS))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_goes_through_megatron_bit_for_bit(one_rank: dict[str, Outcome], folder: Path, name: str) -> None:
    assert_identical(one_rank[name].untouched, make_model(folder, name))


@pytest.mark.parametrize(("kind", "kept"), [("recompute-full", "qwen2"), ("recompute-selective", "moe")])
def test_recomputed_activations_give_the_same_numbers(one_rank: dict[str, Outcome], kind: str, kept: str) -> None:
    assert_same_training(one_rank[kind], one_rank[kept], 1e-6)


@pytest.mark.parametrize("kind", TWO)
def test_two_ranks_train_like_one(
    one_rank: dict[str, Outcome], two_ranks: dict[str, Outcome], folder: Path, kind: str
) -> None:
    model, _ = TWO[kind]
    assert_same_training(two_ranks[kind], one_rank[model])
    assert_identical(two_ranks[kind].untouched, make_model(folder, model))


@pytest.mark.slow
@pytest.mark.parametrize("kind", FOUR)
def test_four_ranks_train_like_one(
    one_rank: dict[str, Outcome], four_ranks: dict[str, Outcome], folder: Path, kind: str
) -> None:
    model, _ = FOUR[kind]
    assert_same_training(four_ranks[kind], one_rank[model])
    assert_identical(four_ranks[kind].untouched, make_model(folder, model))


def test_a_resumed_run_continues_exactly(one_rank: dict[str, Outcome]) -> None:
    assert len(one_rank["resumed"].steps) == STEPS - SAVED
    assert_same_training(one_rank["resumed"], one_rank["qwen2"], 1e-6)


@pytest.mark.parametrize(("kind", "alone"), [("resharded", "qwen2"), ("resharded-experts", "moe")])
def test_a_checkpoint_of_one_rank_is_resumed_by_two(
    one_rank: dict[str, Outcome], two_ranks: dict[str, Outcome], kind: str, alone: str
) -> None:
    assert len(two_ranks[kind].steps) == STEPS - SAVED
    assert_same_training(two_ranks[kind], one_rank[alone])


def test_a_loss_that_is_not_finite_is_refused_before_any_weight_changes(one_rank: dict[str, Outcome]) -> None:
    poisoned = one_rank["poisoned"]
    assert "loss of the step 0 -> 1 is nan" in poisoned.refused
    assert all(torch.equal(poisoned.trained[name], tensor) for name, tensor in poisoned.untouched.items())
