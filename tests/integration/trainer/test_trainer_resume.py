"""Ten steps, or five, a SIGKILL and five more: the same losses and weights, on the same ranks and on others."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from async_grpo.config import dump, validate
from async_grpo.errors import TrainingError
from tests.support.trainer_programs.launching import launch
from tests.support.trainer_programs.models import make_model

STEPS, SAVED, KILLED = 10, 5, 7
LAYOUTS = {"tensor": {"tensor_parallel": 2}, "pipeline": {"pipeline_parallel": 2}, "data": {}}
"""Of two ranks."""


@dataclass(frozen=True)
class Outcome:
    """What a program wrote."""

    losses: list[float]
    weights: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Bench:
    """The folder where all of it happens."""

    folder: Path

    def case(self, name: str, ranks: int, *, run: str, layout: dict[str, int], **changes: Any) -> dict[str, Any]:
        """A case of the program; `run` names the folder whose checkpoints it uses."""
        raw: dict[str, Any] = {
            "name": run,
            "runs_dir": str(self.folder),
            "model": {"random": {}},
            "rollout": {"vllm": {"max_model_len": 110}},
            "trainer": {
                "processes": ranks,
                **layout,
                "micro_batch_tokens": 110,
                "optimizer": {"lr": 1e-4, "weight_decay": 0.1, "eps": 1e-5},
            },
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(dump(validate(raw, "test")))
        files = {
            "config": str(path),
            "model": str(make_model(self.folder, "qwen2")),
            "out": str(path.with_suffix(".json")),
        }
        return {**files, "versions": STEPS, "save_at": None, "resume": False, "poisoned": False, **changes}

    def launch(self, ranks: int, cases: list[dict[str, Any]]) -> None:
        """All cases in one start of the processes, which is most of the time."""
        listed = self.folder / "cases.json"
        listed.write_text(json.dumps(cases))
        launch("train_steps", ranks, listed)

    def outcome(self, name: str) -> Outcome:
        found = json.loads((self.folder / f"{name}.json").read_text())
        weights = load_file(self.folder / f"{name}.trained.safetensors")
        return Outcome([step["loss"] for step in found["steps"]], weights)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Two ranks of each layout train straight through, and up to a SIGKILL; then others resume, on two ranks and on
    one."""
    made = Bench(tmp_path_factory.mktemp("resume"))
    straight = [made.case(f"{name}-straight", 2, run=f"{name}-straight", layout=LAYOUTS[name]) for name in LAYOUTS]
    crashed = [
        made.case(f"{name}-crash", 2, run=name, layout=LAYOUTS[name], save_at=SAVED, versions=KILLED)
        for name in LAYOUTS
    ]
    crashed[-1]["die"] = True
    with pytest.raises(TrainingError, match=r"rank \d was killed by SIGKILL"):
        made.launch(2, straight + crashed)
    made.launch(2, [made.case(f"{name}-same", 2, run=name, layout=LAYOUTS[name], resume=True) for name in LAYOUTS])
    made.launch(1, [made.case(f"{name}-one", 1, run=name, layout={}, resume=True) for name in LAYOUTS])
    return made


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", ["same", "one"])
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(bench: Bench, layout: str, ranks: str) -> None:
    straight, resumed = bench.outcome(f"{layout}-straight"), bench.outcome(f"{layout}-{ranks}")
    assert len(resumed.losses) == STEPS - SAVED
    assert resumed.losses == pytest.approx(straight.losses[SAVED:], rel=1e-6, abs=1e-6)
    for name, tensor in straight.weights.items():
        difference = (resumed.weights[name] - tensor).abs().max().item()
        assert difference <= 1e-6, f"{name} differs by {difference:.2e}"


def test_on_the_same_ranks_it_is_the_same_to_the_last_bit(bench: Bench) -> None:
    for layout in LAYOUTS:
        straight, resumed = bench.outcome(f"{layout}-straight"), bench.outcome(f"{layout}-same")
        assert resumed.losses == straight.losses[SAVED:]
        assert all(torch.equal(resumed.weights[name], tensor) for name, tensor in straight.weights.items())
