"""The Megatron model trains like plain Hugging Face and torch AdamW, for every family and in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.trainer_programs.launching import (
    KINDS,
    Outcome,
    Run,
    adamw,
    assert_close,
    assert_same_figures,
    trained_tolerance,
)
from tests.support.trainer_programs.models import make_model
from tests.support.trainer_programs.plain import plain_steps

FAMILIES = ["qwen2", "qwen2-untied", "qwen3", "llama", "llama3", "moe", "moe-unnormed"]
STEPS = 10
SAVED = 4
"""The step whose checkpoint is resumed from."""

LR = 1e-3

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
    "data-pipeline": ("qwen2", {"pipeline_parallel": 2}),
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


def runs(folder: Path) -> dict[int, dict[str, Run]]:
    """Every family; twice with less memory; again from checkpoints that others left, also of other ranks."""

    def run(name: str, trainer: dict[str, Any] | None = None, resumes: str = "", **case: Any) -> Run:
        case = {"versions": [*range(SAVED if resumes else 0, STEPS)], "resume": bool(resumes), **case}
        return Run(make_model(folder, name), adamw(LR) | (trainer or {}), case, checkpoints_of=resumes)

    def laid_out(kinds: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Run]:
        return {name: run(model, layout) for name, (model, layout) in kinds.items()}

    return {
        1: {
            **{name: run(name, save_at=SAVED, logprobs=True) for name in FAMILIES},
            "recompute-full": run("qwen2", {"recompute": "full"}),
            "recompute-selective": run("moe", {"recompute": "selective"}),
            "resumed": run("qwen2", resumes="qwen2"),
        },
        2: {
            **laid_out(TWO),
            "resharded": run("qwen2", resumes="qwen2"),
            "resharded-experts": run("moe", {"expert_parallel": 2}, resumes="moe"),
            **{f"{kind}-saved": run("qwen2", layout, save_at=SAVED) for kind, layout in KINDS.items()},
            **{f"{kind}-resumed": run("qwen2", layout, f"{kind}-saved") for kind, layout in KINDS.items()},
        },
        4: laid_out(FOUR),
    }


def assert_same_training(found: Outcome, expected: Outcome, tolerance: float = 1e-5) -> None:
    for mine, theirs in zip(found.steps, expected.steps[-len(found.steps) :], strict=True):
        assert_same_figures(mine, theirs, tolerance)
    if len(found.steps) == len(expected.steps):  # a resumed one begins later
        assert_close(found.first, expected.first, tolerance)
    assert_close(found.trained, expected.trained, tolerance)


def assert_plain_training(found: Outcome, model: Path) -> None:
    expected = plain_steps(model, STEPS, LR)
    for mine, theirs in zip(found.steps, expected.steps, strict=True):
        assert_same_figures(mine, theirs, 1e-5)
    assert_close(found.first, expected.weights[0], 1e-5)
    assert_close(found.trained, expected.weights[-1], trained_tolerance(LR, STEPS))


def assert_identical(found: dict[str, torch.Tensor], model: Path) -> None:
    original = load_file(model / "model.safetensors")
    assert found.keys() == original.keys()
    assert all(torch.equal(found[name], original[name]) for name in original)


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probabilities_and_ten_steps_equal_hugging_face_and_torch_adamw(
    one_rank: dict[str, Outcome], folder: Path, name: str
) -> None:
    expected = plain_steps(make_model(folder, name), STEPS, LR)
    assert sorted(one_rank[name].found["logprobs"]) == pytest.approx(sorted(expected.logprobs), abs=1e-5)
    assert_plain_training(one_rank[name], make_model(folder, name))


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
    assert_same_training(one_rank["resumed"], one_rank["qwen2"], 1e-6)


@pytest.mark.parametrize(("kind", "alone"), [("resharded", "qwen2"), ("resharded-experts", "moe")])
def test_a_checkpoint_of_one_rank_is_resumed_by_two(
    one_rank: dict[str, Outcome], two_ranks: dict[str, Outcome], kind: str, alone: str
) -> None:
    assert_same_training(two_ranks[kind], one_rank[alone])


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_resume_to_the_last_bit(two_ranks: dict[str, Outcome], kind: str) -> None:
    resumed, straight = two_ranks[f"{kind}-resumed"], two_ranks[f"{kind}-saved"]
    assert resumed.steps == straight.steps[SAVED:]
    assert all(torch.equal(resumed.trained[name], tensor) for name, tensor in straight.trained.items())
