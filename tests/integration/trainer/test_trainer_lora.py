"""Adapters train like those of PEFT on the Hugging Face model, in every layout of the ranks, and nothing else moves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.nn.utils import parametrize

from async_grpo.config.model import LoraConfig
from async_grpo.weights.lora import adapter_names, base_name
from tests.support.trainer_programs.launching import (
    Outcome,
    Run,
    Tensors,
    adamw,
    assert_close,
    assert_same_figures,
    trained_tolerance,
)
from tests.support.trainer_programs.models import make_model
from tests.support.trainer_programs.plain import load, steps_of

LR, STEPS, SAVED = 1e-2, 4, 2
TRAINED_TOLERANCE = trained_tolerance(LR, STEPS)
REFERENCE = {"objective": {"kl_beta": 0.1}, "reference": {"source": "frozen"}}
LORA: dict[str, Any] = {"rank": 4, "alpha": 12, "rslora": True}
SOME: dict[str, Any] = {"rank": 3, "targets": ["v_proj", "gate_proj", "o_proj"]}
ONE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "all": ("qwen2", LORA, {}),
    "some": ("qwen3", SOME, {}),
    "experts": ("moe", {"rank": 4, "targets": ["q_proj", "o_proj"]}, {}),
    "recomputed": ("qwen2", LORA, {"recompute": "full"}),
}
TWO: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tensor": ("qwen2", "all", {"tensor_parallel": 2}),
    "tensor-some": ("qwen3", "some", {"tensor_parallel": 2}),
    "sequence": ("qwen3", "some", {"tensor_parallel": 2, "sequence_parallel": True}),
    "pipeline": ("qwen2", "all", {"pipeline_parallel": 2}),
    "data": ("qwen2", "all", {}),
    "context": ("qwen2", "all", {"context_parallel": 2}),
    "experts-on-tensor": ("moe", "experts", {"tensor_parallel": 2, "sequence_parallel": True}),
}
"""Model, the run on one rank, and how two are laid out."""


def runs(folder: Path) -> dict[int, dict[str, Run]]:
    def run(name: str, lora: dict[str, Any], trainer: dict[str, Any], resumes: str = "", **case: Any) -> Run:
        case = {"versions": [*range(SAVED if resumes else 0, STEPS)], "resume": bool(resumes), **case}
        return Run(make_model(folder, name), adamw(LR) | trainer, case, checkpoints_of=resumes, lora=lora)

    return {
        1: {
            **{name: run(*given, save_at=SAVED) for name, given in ONE.items()},
            "saved-last": run("qwen2", LORA, {}, save_at=STEPS),
            "referred": run("qwen2", LORA, REFERENCE, swap=True),
            "resumed": run("qwen2", LORA, {}, resumes="all"),
        },
        2: {
            **{name: run(model, ONE[alone][1], layout) for name, (model, alone, layout) in TWO.items()},
            "resharded": run("qwen2", LORA, {"tensor_parallel": 2}, resumes="all"),
        },
    }


class LowRank(torch.nn.Module):
    """W -> W + scale * B A."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.a, self.b, self.scale = torch.nn.Parameter(a.clone()), torch.nn.Parameter(b.clone()), scale

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.scale * self.b @ self.a


def longhand(folder: Path, lora: LoraConfig, first: Tensors) -> tuple[Any, Callable[[], Tensors]]:
    """The Hugging Face model with adapters in plain torch, and how to read them."""
    model = load(folder).float().requires_grad_(False)
    found = {}
    for name in first:
        base = base_name(name)
        if base is not None and ".lora_A." in name:
            other = name.replace(".lora_A.", ".lora_B.")
            low = LowRank(first[name], first[other], lora.scale)
            parametrize.register_parametrization(model.get_submodule(base.removesuffix(".weight")), "weight", low)
            found |= {name: low.a, other: low.b}
    return model, lambda: {name: tensor.detach().clone() for name, tensor in found.items()}


def peft(folder: Path, lora: LoraConfig, first: Tensors) -> tuple[Any, Callable[[], Tensors]]:
    package = pytest.importorskip("peft")
    config = package.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.peft_alpha,
        use_rslora=lora.rslora,
        target_modules=list(lora.targets),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    model = package.get_peft_model(load(folder).float(), config)
    parameters = {name.replace(".default.", "."): each for name, each in model.named_parameters() if each.requires_grad}
    assert parameters.keys() == first.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(first[name])
    return model, lambda: {name: parameter.detach().clone() for name, parameter in parameters.items()}


@pytest.mark.parametrize("with_adapters", [longhand, peft])
@pytest.mark.parametrize("name", ONE)
def test_adapters_train_like_those_of_peft_on_hugging_face(
    one_rank: dict[str, Outcome], folder: Path, name: str, with_adapters: Callable[..., Any]
) -> None:
    model, lora, _ = ONE[name]
    found = one_rank[name]
    expected = steps_of(*with_adapters(make_model(folder, model), LoraConfig(**lora), found.untouched), STEPS, LR)
    for mine, theirs in zip(found.steps, expected.steps, strict=True):
        assert_same_figures(mine, theirs, 1e-5)
    assert_close(found.first, expected.weights[0], 1e-5)
    assert_close(found.trained, expected.weights[-1], TRAINED_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO)
def test_two_ranks_train_adapters_like_one(
    one_rank: dict[str, Outcome], two_ranks: dict[str, Outcome], name: str
) -> None:
    found, expected = two_ranks[name], one_rank[TWO[name][1]]
    assert_close(found.untouched, expected.untouched, 0.0)
    for mine, theirs in zip(found.steps, expected.steps, strict=True):
        assert_same_figures(mine, theirs, 1e-5)
    assert_close(found.trained, expected.trained, TRAINED_TOLERANCE)


def test_a_resumed_run_continues_its_adapters_bit_for_bit(one_rank: dict[str, Outcome]) -> None:
    assert_close(one_rank["resumed"].trained, one_rank["all"].trained, 0.0)


def test_a_checkpoint_of_adapters_is_resumed_by_two_ranks(
    one_rank: dict[str, Outcome], two_ranks: dict[str, Outcome]
) -> None:
    assert_close(two_ranks["resharded"].trained, one_rank["all"].trained, TRAINED_TOLERANCE)


def test_a_checkpoint_holds_adapters_and_their_optimizer_alone(one_rank: dict[str, Outcome]) -> None:
    (checkpoint,) = (one_rank["all"].run_dir / "checkpoints").glob("0*")
    kinds = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {name for name, kind in kinds.items() if isinstance(kind, TensorStorageMetadata)}
    states = ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.", "optimizer.state.param.")
    assert tensors == {state + name for state in states for name in one_rank["all"].trained}


def test_the_reference_of_adapters_is_the_policy_without_them(one_rank: dict[str, Outcome]) -> None:
    found = one_rank["referred"]
    assert found.steps[0]["kl"] == 0.0
    assert found.steps[1]["kl"] > 1e-6
    assert found.found["swap"] == {**found.found["swap"], "back": True, "others": len(found.trained)}


def exported(found: Outcome, target: Path, *options: str) -> dict[str, torch.Tensor]:
    command = [sys.executable, "-m", "async_grpo.app.cli.main", "export", str(found.run_dir), str(target), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return {name: tensor for path in target.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.slow
def test_a_run_is_exported_as_adapters_that_peft_loads_and_merged(
    one_rank: dict[str, Outcome], folder: Path, tmp_path: Path
) -> None:
    found, base = one_rank["saved-last"], load_file(make_model(folder, "qwen2") / "model.safetensors")
    assert_close(exported(found, tmp_path / "adapters"), found.trained, 0.0)
    whole = exported(found, tmp_path / "merged", "--merged")
    assert whole.keys() == base.keys()
    scale = LoraConfig(**LORA).scale
    for name, tensor in base.items():
        a, b = (found.trained.get(each) for each in adapter_names(name))
        expected = tensor if a is None or b is None else tensor + scale * b @ a
        assert (whole[name] - expected).abs().max() <= 1e-6
    package = pytest.importorskip("peft")
    model = package.PeftModel.from_pretrained(load(make_model(folder, "qwen2")), tmp_path / "adapters")
    tokens = torch.arange(20, 40)[None]
    merged = load(tmp_path / "merged")
    assert (model(tokens).logits - merged(tokens).logits).abs().max() <= 1e-5
