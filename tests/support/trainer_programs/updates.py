"""Start `update_steps` on some runs, and read what it found."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from async_grpo.config import RunConfig, dump, validate
from tests.support.trainer_programs.aged_batch import LONGEST
from tests.support.trainer_programs.launching import launch

TEMPERATURE = 0.8
HUGE = 1e6
GRADIENT = {"lr": HUGE, "eps": HUGE, "clip_grad": HUGE, "beta1": 0.0}
"""Adam with a huge eps and a learning rate as huge is plain gradient descent."""
PACKING = {"micro_batches", "packing_efficiency", "rank_balance"}
"""Figures that depend on how a batch is cut, and must."""


@dataclass(frozen=True)
class Run:
    """`trainer`: keys of its section; `case`: those of `update_steps.Case`."""

    trainer: dict[str, Any] = field(default_factory=dict)
    case: dict[str, Any] = field(default_factory=dict)
    folder: str = ""
    """Run whose folder, and so whose checkpoints, are used; default its own."""
    precision: str = "float32"

    def config(self, name: str, folder: Path, ranks: int = 1) -> RunConfig:
        raw: dict[str, Any] = {
            "name": self.folder or name,
            "runs_dir": str(folder / "runs"),
            "groups_per_step": 4,
            "model": {"random": {}, "precision": self.precision},
            "sampling": {"temperature": TEMPERATURE, "max_tokens": LONGEST},
            "rollout": {"vllm": {"max_model_len": 40}},
            "telemetry": {"tensorboard": False},
            "trainer": {"processes": ranks, "micro_batch_tokens": 60, "optimizer": GRADIENT, **self.trainer},
        }
        return validate(raw, name)


@dataclass(frozen=True)
class Outcome:
    """What the program wrote."""

    found: dict[str, Any]
    moved: dict[str, torch.Tensor]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Figures of the steps that were made."""
        return [step for step in self.found["steps"] if step is not None]

    @property
    def step(self) -> dict[str, Any]:
        """Of the only one."""
        (step,) = self.steps
        return step


def run_all(folder: Path, model: Path, runs: dict[str, Run], ranks: int) -> dict[str, Outcome]:
    """All in one start of the processes, which is most of the time."""
    outs = {name: folder / f"{ranks}-{number}.json" for number, name in enumerate(runs)}
    cases = []
    for number, (name, run) in enumerate(runs.items()):
        config = run.config(f"run-{ranks}-{number}", folder, ranks)
        config.run_dir.mkdir(parents=True, exist_ok=True)
        written = outs[name].with_suffix(".yaml")
        written.write_text(dump(config))
        cases.append({"config": str(written), "model": str(model), "out": str(outs[name]), **run.case})
    listed = folder / f"cases-{ranks}.json"
    listed.write_text(json.dumps(cases))
    launch("update_steps", ranks, listed)
    return {
        name: Outcome(json.loads(out.read_text()), load_file(out.with_suffix(".safetensors")))
        for name, out in outs.items()
    }


def make_other(model: Path, folder: Path) -> Path:
    """The same architecture, with weights that have gone another way."""
    other = AutoModelForCausalLM.from_pretrained(model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    other.save_pretrained(folder)
    return folder


def assert_same_figures(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """All that is expected, but for how the batch was cut."""
    for key in {key for key, value in expected.items() if value is not None} - PACKING:
        assert found[key] == pytest.approx(expected[key], rel=tolerance, abs=tolerance), key


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Relative to the largest of them."""
    size = max(tensor.abs().max().item() for tensor in expected.values())
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        difference = (tensor - expected[name]).abs().max().item()
        assert difference <= tolerance * size, f"{name} differs by {difference:.2e} of {size:.2e}"
