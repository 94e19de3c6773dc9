"""Start a program as the ranks of a trainer; start `steps` on some runs, and read what each of them came to."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from async_grpo.config import dump, validate
from tests.support.trainer_programs.batches import AGED_VERSION, LONGEST
from trainer.node_main import Node, NodeSetup

ROOT = Path(__file__).parents[3]
TEMPERATURE = 0.8
CLIP = 0.5
CAP = 2.0
DECAY = 0.1
EPS = 1e-5
"""Epsilon of AdamW: large enough that gradients that are zero but for rounding stay without effect."""
HUGE = 1e6
GRADIENT = {"lr": HUGE, "eps": HUGE, "clip_grad": HUGE, "beta1": 0.0}
"""Adam with a huge eps and a learning rate as huge is plain gradient descent: weights move by minus their gradient."""
AGED = {"aged": True, "versions": [AGED_VERSION]}
KINDS: dict[str, dict[str, int]] = {"data": {}, "tensor": {"tensor_parallel": 2}, "pipeline": {"pipeline_parallel": 2}}
"""The kinds of parallelism of two ranks."""
OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {"preset": "grpo"},
    "dr_grpo": {"preset": "dr_grpo"},
    "gspo": {"preset": "gspo", "clip_low": 0.05, "clip_high": 0.1},
    "cispo": {"preset": "cispo", "clip_high": 0.3},
    "gmpo": {"loss": "gmpo", "advantage": "lite_ppo"},
    "sapo": {"loss": "sapo", "advantage": "reinforce_pp_baseline", "aggregation": "seq_mean_token_sum"},
    "dppo_tv": {"loss": "dppo_tv", "clip_low": 0.003, "clip_high": 0.003, "advantage": "opo"},
    "topr": {"loss": "topr", "advantage": "rloo"},
    "loglinear": {"prox": "loglinear", "clip_low": 0.1, "clip_high": 0.1, "dual_clip": 1.2},
    "corrected": {
        "loss": "ppo_clip",
        "prox": "recompute",
        "corrections": ["token_tis", {"kind": "seq_mis", "low": 0.005}],
    },
    "vcpo": {"preset": "vcpo"},
    "m2po": {"preset": "dapo", "corrections": [{"kind": "m2po", "limit": 0.06}, {"kind": "opsm", "limit": 0.05}]},
    "ess_lr and entropy": {"prox": "loglinear", "corrections": ["ess_lr"], "entropy_coef": 0.1},
    "prime_rl": {"preset": "prime_rl", "clip_low": 0.003, "clip_high": 0.003},
    "scale_rl": {"preset": "scale_rl", "clip_high": 0.3},
    "weight and reject": {
        "loss": "ppo_clip",
        "prox": "recompute",
        "advantage": "maxrl",
        "advantage_norm": "batch",
        "corrections": [
            {"kind": "weight", "level": "geo", "low": 0.9},
            {"kind": "reject", "high": 0.5},
            {"kind": "kpop", "limit": 0.05},
        ],
    },
}
"""One of every kind of loss, advantage, aggregation, pi_prox and correction."""
PACKING = {"micro_batches", "packing_efficiency", "rank_balance"}
"""Figures that depend on how a batch is cut."""

Tensors = dict[str, torch.Tensor]


def adamw(lr: float) -> dict[str, Any]:
    """Keys of a trainer that optimizes as `plain` does."""
    return {
        "optimizer": {"lr": lr, "weight_decay": DECAY, "clip_grad": CLIP, "eps": EPS},
        "objective": {"behaviour_cap": CAP, "advantage_norm": "none"},
    }


@dataclass(frozen=True)
class Run:
    """`trainer`: keys of its section; `case`: those of `steps.Case`."""

    model: Path
    trainer: dict[str, Any] = field(default_factory=dict)
    case: dict[str, Any] = field(default_factory=dict)
    checkpoints_of: str = ""
    """The run that it resumes from; default itself."""
    precision: str = "float32"
    fp32_head: bool = False
    lora: dict[str, Any] | None = None
    """Keys of model.lora; the tensors of the outcome are then those of the adapters."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """More keys of sampling."""

    def prepare(self, folder: Path, name: str, ranks: int) -> dict[str, Any]:
        """Write the configuration; returns the case for `steps`."""
        raw: dict[str, Any] = {
            "name": _plain(self.checkpoints_of or name),
            "runs_dir": str(folder / "runs"),
            "groups_per_step": 4,
            "model": {
                "path": str(self.model),
                "precision": self.precision,
                "fp32_head": self.fp32_head,
                "lora": self.lora,
            },
            "sampling": {"temperature": TEMPERATURE, "max_tokens": LONGEST, **self.sampling},
            "rollout": {"vllm": {"max_model_len": 40}},
            "telemetry": {"trackers": []},
            "trainer": {"processes": ranks, "micro_batch_tokens": 110, "optimizer": GRADIENT, **self.trainer},
        }
        config = validate(raw, name)
        config.run_dir.mkdir(parents=True, exist_ok=True)
        out = folder / f"{ranks}-{_plain(name)}.json"
        for written in (out.with_suffix(".yaml"), config.run_dir / "config.yaml"):
            written.write_text(dump(config))
        return {"config": str(out.with_suffix(".yaml")), "model": str(self.model), "out": str(out), **self.case}


@dataclass(frozen=True)
class Outcome:
    """What the program wrote. Tensors as they lie on a disk: before the steps, after the first, after all."""

    found: dict[str, Any]
    untouched: Tensors
    first: Tensors
    trained: Tensors
    run_dir: Path

    @classmethod
    def read(cls, folder: Path, name: str, ranks: int, run: Run) -> Outcome:
        out = folder / f"{ranks}-{_plain(name)}.json"
        states = (load_file(out.with_suffix(f".{state}.safetensors")) for state in ("untouched", "first", "trained"))
        return cls(json.loads(out.read_text()), *states, folder / "runs" / _plain(run.checkpoints_of or name))

    @property
    def moved(self) -> Tensors:
        """How far the weights have moved."""
        return {name: tensor - self.untouched[name] for name, tensor in self.trained.items()}

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Figures of the steps that were made."""
        return [step for step in self.found["steps"] if step is not None]

    @property
    def step(self) -> dict[str, Any]:
        """Those of the only step."""
        (step,) = self.steps
        return step


def run_all(folders: dict[Path, dict[str, Run]], ranks: int) -> dict[Path, dict[str, Outcome]]:
    """The outcomes of runs by folder and name; all in one start of the ranks, which is most of the time."""
    cases = [run.prepare(folder, name, ranks) for folder, runs in folders.items() for name, run in runs.items()]
    listed = next(iter(folders)) / f"cases-{ranks}.json"
    listed.write_text(json.dumps(cases))
    launch("steps", ranks, listed, timeout_s=550.0)
    return {
        folder: {name: Outcome.read(folder, name, ranks, run) for name, run in runs.items()}
        for folder, runs in folders.items()
    }


@dataclass(slots=True)
class ProgramNode(Node):
    """The trainer on this machine, whose ranks find the tests."""

    def _environments(self, setup: NodeSetup) -> list[dict[str, str]]:
        found = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        return [told | {"OMP_NUM_THREADS": "1", "PYTHONPATH": found} for told in Node._environments(self, setup)]


def launch(program: str, ranks: int, *arguments: object, timeout_s: float = 400.0) -> None:
    """Wait until all ranks have ended. Raises TrainingError if one fails."""
    config = validate({"name": program, "model": {"random": {}}, "trainer": {"processes": ranks}}, "test")
    argv = [sys.executable, "-m", f"tests.support.trainer_programs.{program}", *map(str, arguments)]
    asyncio.run(asyncio.wait_for(ProgramNode(config, Path(), Path(), 0, argv=argv).run(), timeout_s))


def assert_same_figures(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """All that is expected, but for how the batch was cut."""
    for key in {key for key, value in expected.items() if value is not None} - PACKING:
        assert found[key] == pytest.approx(expected[key], rel=tolerance, abs=tolerance), key


def assert_same_moves(found: Outcome, expected: Tensors, tolerance: float) -> None:
    """How far each weight has moved, relative to the largest move."""
    assert_close(found.moved, expected, tolerance * max(tensor.abs().max().item() for tensor in expected.values()))


def assert_close(found: Tensors, expected: Tensors, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        difference = (tensor - expected[name]).abs().max().item()
        assert difference <= tolerance, f"{name} differs by {difference:.2e} of {tolerance:.2e}"


def trained_tolerance(lr: float, steps: int) -> float:
    """Allowed difference of weights after `steps` steps of AdamW: a thousandth of the farthest that a weight can move.

    AdamW divides a gradient by its own size. Where a gradient is small because large terms cancel, its rounding error
    (which is relative to those terms, and another one with every processor's kernels) becomes an error of the move.
    """
    return 1e-3 * lr * steps


def assert_same_step(found: Outcome, expected: Outcome, tolerance: float) -> None:
    """One step came to the same figures and moved the weights as far."""
    assert_same_figures(found.step, expected.step, tolerance)
    assert_same_moves(found, expected.moved, tolerance)


def _plain(name: str) -> str:
    """Fit for a file, and for the name of a run."""
    return "".join(letter if letter.isalnum() else "-" for letter in name)
