"""Start a program as the ranks of a trainer; `train_steps` on some cases, and read what it found."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from async_grpo.config import RunConfig, dump, validate
from trainer.node_main import Node, NodeSetup

ROOT = Path(__file__).parents[3]
TEMPERATURE = 0.8
LR, DECAY, CLIP, CAP = 1e-3, 0.1, 0.5, 2.0
EPS = 1e-5
"""Of AdamW: large enough that gradients that are zero but for rounding stay without effect."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """What a program wrote. Tensors as they lie on a disk: before the steps, after the first, after all."""

    steps: list[dict[str, float]]
    logprobs: list[float]
    untouched: Tensors
    first: Tensors
    trained: Tensors
    refused: str = ""


@dataclass(frozen=True)
class Case:
    """One run of the program; `run` names the run folder whose checkpoints it uses."""

    name: str
    model: Path
    versions: int
    trainer: dict[str, Any] = field(default_factory=dict)
    """Keys of the trainer, such as its layout."""
    precision: str = "float32"
    run: str = ""
    save_at: int | None = None
    resume: bool = False
    poisoned: bool = False

    def prepare(self, folder: Path, ranks: int) -> dict[str, Any]:
        (folder / f"{self.name}.yaml").write_text(dump(self._config(folder, ranks)))
        files = {"config": f"{folder / self.name}.yaml", "model": str(self.model), "out": f"{folder / self.name}.json"}
        how = {"save_at": self.save_at, "resume": self.resume, "poisoned": self.poisoned}
        return {**files, **how, "versions": self.versions}

    def _config(self, folder: Path, ranks: int) -> RunConfig:
        raw: dict[str, Any] = {
            "name": self.run or self.name,
            "runs_dir": str(folder),
            "model": {"path": str(self.model), "precision": self.precision},
            "sampling": {"temperature": TEMPERATURE},
            "rollout": {"vllm": {"max_model_len": 110}},
            "trainer": {
                "processes": ranks,
                "micro_batch_tokens": 110,
                "optimizer": {"lr": LR, "weight_decay": DECAY, "clip_grad": CLIP, "eps": EPS},
                "objective": {"behaviour_cap": CAP},
                **self.trainer,
            },
        }
        return validate(raw, "test")


def train(folder: Path, cases: list[Case], ranks: int) -> dict[str, Outcome]:
    """All cases in one start of the processes, which is most of the time."""
    listed = [case.prepare(folder, ranks) for case in cases]
    (folder / f"cases-{ranks}.json").write_text(json.dumps(listed))
    launch("train_steps", ranks, folder / f"cases-{ranks}.json")
    return {case.name: _read(folder / f"{case.name}.json") for case in cases}


@dataclass(slots=True)
class ProgramNode(Node):
    """The trainer on this machine, with another program in place of its ranks."""

    argv: list[str] = field(default_factory=list)

    def _argv(self) -> list[str]:
        return self.argv

    def _environments(self, setup: NodeSetup) -> list[dict[str, str]]:
        found = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        return [told | {"OMP_NUM_THREADS": "1", "PYTHONPATH": found} for told in Node._environments(self, setup)]


def launch(program: str, ranks: int, *arguments: object, timeout_s: float = 400.0) -> None:
    """Until all ranks have ended. Raises TrainingError if one fails."""
    config = validate({"name": program, "model": {"random": {}}, "trainer": {"processes": ranks}}, "test")
    argv = [sys.executable, "-m", f"tests.support.trainer_programs.{program}", *map(str, arguments)]
    asyncio.run(asyncio.wait_for(ProgramNode(config, Path(), Path(), 0, argv=argv).run(), timeout_s))


def _read(path: Path) -> Outcome:
    found = json.loads(path.read_text())
    states = ("untouched", "first", "trained")
    untouched, first, trained = (load_file(path.with_suffix(f".{state}.safetensors")) for state in states)
    return Outcome(found["steps"], found["logprobs"], untouched, first, trained, found.get("refused", ""))
