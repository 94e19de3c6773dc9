"""The Megatron model trains like plain Hugging Face and torch AdamW, on one rank and on several."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_programs.batches import VOCAB, make_batch
from transformers import AutoModelForCausalLM, Qwen2Config

from async_grpo.algorithms import ADVANTAGES
from async_grpo.config import RunConfig, dump, validate

PROGRAMS = Path(__file__).parent
VERSIONS = 4
TEMPERATURE = 0.8
LR, DECAY, CLIP, CAP = 1e-3, 0.1, 0.5, 2.0
EPS = 1e-5
"""Of AdamW: large enough that gradients that are zero but for rounding stay without effect."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """What a program wrote."""

    steps: list[dict[str, float]]
    logprobs: list[float]
    untouched: Tensors
    trained: Tensors
    refused: str = ""


@dataclass(frozen=True)
class Case:
    """One run of the program; `run` names the run folder whose checkpoints it uses."""

    name: str
    model: Path
    tensor: int = 1
    pipeline: int = 1
    run: str = ""
    save_at: int | None = None
    resume: bool = False
    poisoned: bool = False

    def prepare(self, folder: Path, ranks: int) -> dict[str, Any]:
        config = run_config(folder, self.run or self.name, tensor=self.tensor, pipeline=self.pipeline, ranks=ranks)
        (folder / f"{self.name}.yaml").write_text(dump(config))
        files = {"config": f"{folder / self.name}.yaml", "model": str(self.model), "out": f"{folder / self.name}.json"}
        return {**files, "save_at": self.save_at, "resume": self.resume, "poisoned": self.poisoned}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def make_model(folder: Path) -> Callable[[bool], Path]:
    @functools.cache
    def make(tied: bool) -> Path:
        torch.manual_seed(3)
        config = Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            max_position_embeddings=128,
            tie_word_embeddings=tied,
            initializer_range=0.1,
        )
        model = AutoModelForCausalLM.from_config(config).float()
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # all zeros and ones would hide a mistake
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
        path = folder / f"model-{tied}"
        model.save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="module")
def one_rank(folder: Path, make_model: Callable[[bool], Path]) -> dict[str, Outcome]:
    """tied, untied; tied again from the checkpoint that the first one left at version 2; a NaN reward."""
    cases = [
        Case("tied", make_model(True), save_at=2),
        Case("untied", make_model(False)),
        Case("resumed", make_model(True), run="tied", resume=True),
        Case("poisoned", make_model(True), poisoned=True),
    ]
    return train(folder, cases, ranks=1)


@pytest.fixture(scope="module")
def two_ranks(folder: Path, make_model: Callable[[bool], Path], one_rank: dict[str, Outcome]) -> dict[str, Outcome]:
    """Two ranks in each kind of parallelism; `resharded` resumes from the checkpoint of one rank."""
    cases = [
        Case("tensor", make_model(False), tensor=2),
        Case("data", make_model(True)),
        Case("pipeline", make_model(True), pipeline=2),
        Case("resharded", make_model(True), run="tied", resume=True),
    ]
    return train(folder, cases, ranks=2)


def train(folder: Path, cases: list[Case], ranks: int) -> dict[str, Outcome]:
    """All cases in one start of the processes, which is most of the time."""
    listed = [case.prepare(folder, ranks) for case in cases]
    (folder / f"cases-{ranks}.json").write_text(json.dumps(listed))
    launch("train_steps", ranks, folder / f"cases-{ranks}.json")
    return {case.name: read_outcome(folder / f"{case.name}.json") for case in cases}


def run_config(folder: Path, name: str, *, tensor: int, pipeline: int, ranks: int) -> RunConfig:
    raw: dict[str, Any] = {
        "name": name,
        "runs_dir": str(folder),
        "model": {"random": {}},
        "sampling": {"temperature": TEMPERATURE},
        "rollout": {"vllm": {"max_model_len": 110}},
        "trainer": {
            "processes": ranks,
            "tensor_parallel": tensor,
            "pipeline_parallel": pipeline,
            "micro_batch_tokens": 110,
            "optimizer": {"lr": LR, "weight_decay": DECAY, "clip_grad": CLIP, "eps": EPS},
            "objective": {"behaviour_cap": CAP},
        },
    }
    return validate(raw, "test")


def launch(program: str, ranks: int, *arguments: object) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *torchrun, "-m", f"trainer_programs.{program}", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAMS)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def read_outcome(path: Path) -> Outcome:
    found = json.loads(path.read_text())
    untouched, trained = (load_file(path.with_suffix(f".{name}.safetensors")) for name in ("untouched", "trained"))
    return Outcome(found["steps"], found["logprobs"], untouched, trained, found.get("refused", ""))


def reference(model_folder: Path) -> Outcome:
    """The same steps in plain torch: one sequence at a time, no packing, no parallelism."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager").float()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}],
        lr=LR,
        betas=(0.9, 0.95),
        eps=EPS,
    )
    with torch.no_grad():
        logprobs = [value for _, _, values in reference_tokens(model, 0) for value in values.tolist()]
    steps = []
    for version in range(VERSIONS):
        optimizer.zero_grad()
        loss, tokens = reference_loss(model, version)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        steps.append({"loss": loss.item(), "grad_norm": norm.item(), "tokens": tokens})
    return Outcome(steps, logprobs, {}, {name: p.detach() for name, p in model.state_dict().items()})


def reference_tokens(model: Any, version: int) -> list[tuple[float, torch.Tensor, torch.Tensor]]:
    """(advantage, behaviour log-probs, log-probs) of every verifiable sample."""
    found = []
    for group in make_batch(version).groups:
        rewards = torch.tensor([[s.reward if s.reward is not None else 0.0 for s in group.samples]])
        valid = torch.tensor([[s.reward is not None for s in group.samples]])
        lengths = torch.tensor([[len(s.token_ids()) for s in group.samples]])
        advantages = ADVANTAGES["grpo"](rewards.double(), valid, lengths)[0].tolist()
        prompt = torch.tensor(group.task.prompt_ids().copy(), dtype=torch.int64)
        for sample, advantage in zip(group.samples, advantages, strict=True):
            if sample.reward is None:
                continue
            tokens = torch.tensor(sample.token_ids().copy(), dtype=torch.int64)
            logits = model(torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
            logprobs = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
            found.append((advantage, torch.tensor(sample.token_logprobs().copy()), logprobs))
    return found


def reference_loss(model: Any, version: int) -> tuple[torch.Tensor, int]:
    """Mean over tokens of -min(w, cap) * r * A, where r is 1 and carries the gradient."""
    rows = reference_tokens(model, version)
    tokens = sum(len(logprobs) for _, _, logprobs in rows)
    terms = [
        -((logprobs.detach() - behaviour).exp().clamp(max=CAP) * (logprobs - logprobs.detach()).exp() * advantage).sum()
        for advantage, behaviour, logprobs in rows
    ]
    return torch.stack(terms).sum() / tokens, tokens


def assert_same_training(found: Outcome, expected: Outcome, tolerance: float) -> None:
    for mine, theirs in zip(found.steps, expected.steps[-len(found.steps) :], strict=True):
        assert mine == pytest.approx(theirs, rel=tolerance, abs=tolerance)
    for name, tensor in found.trained.items():
        difference = (tensor - expected.trained[name]).abs().max().item()
        assert difference <= tolerance, f"{name} differs by {difference:.2e}"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_log_probabilities_of_the_packed_batch_equal_hugging_face(
    one_rank: dict[str, Outcome], make_model: Callable[[bool], Path], tied: bool
) -> None:
    found = one_rank["tied" if tied else "untied"]
    assert sorted(found.logprobs) == pytest.approx(sorted(reference(make_model(tied)).logprobs), abs=1e-5)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_four_steps_equal_hugging_face_and_torch_adamw(
    one_rank: dict[str, Outcome], make_model: Callable[[bool], Path], tied: bool
) -> None:
    assert_same_training(one_rank["tied" if tied else "untied"], reference(make_model(tied)), 1e-5)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_checkpoint_goes_through_megatron_bit_for_bit(
    one_rank: dict[str, Outcome], make_model: Callable[[bool], Path], tied: bool
) -> None:
    original = load_file(make_model(tied) / "model.safetensors")
    found = one_rank["tied" if tied else "untied"].untouched
    assert found.keys() == original.keys()
    assert all(torch.equal(found[name], original[name]) for name in original)


@pytest.mark.parametrize(("kind", "alone"), [("tensor", "untied"), ("data", "tied"), ("pipeline", "tied")])
def test_two_ranks_train_like_one(
    one_rank: dict[str, Outcome], two_ranks: dict[str, Outcome], kind: str, alone: str
) -> None:
    assert_same_training(two_ranks[kind], one_rank[alone], 1e-5)
    originals = one_rank[alone].untouched
    assert all(torch.equal(two_ranks[kind].untouched[name], tensor) for name, tensor in originals.items())


def test_a_resumed_run_continues_exactly(one_rank: dict[str, Outcome]) -> None:
    assert len(one_rank["resumed"].steps) == VERSIONS - 2
    assert_same_training(one_rank["resumed"], one_rank["tied"], 1e-6)


def test_a_checkpoint_of_one_rank_is_resumed_by_two(
    one_rank: dict[str, Outcome], two_ranks: dict[str, Outcome]
) -> None:
    assert len(two_ranks["resharded"].steps) == VERSIONS - 2
    assert_same_training(two_ranks["resharded"], one_rank["tied"], 1e-5)


def test_a_loss_that_is_not_finite_is_refused_before_any_weight_changes(one_rank: dict[str, Outcome]) -> None:
    poisoned = one_rank["poisoned"]
    assert "loss of the step 0 -> 1 is nan" in poisoned.refused
    assert all(torch.equal(poisoned.trained[name], tensor) for name, tensor in poisoned.untouched.items())
