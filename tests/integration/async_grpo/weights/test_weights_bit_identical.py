"""Fifty steps of the real trainer: after each, every receiver maps exactly the trainer's bits. Of adapters, each side
makes the sum with the weights that they are for.

Both sides hash every tensor by themselves. That the engine then multiplies with what its receiver maps is proved in
test_vllm_updates.py.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from async_grpo.config import dump, validate
from tests.support.trainer_programs.launching import launch
from tests.support.trainer_programs.models import make_model

STEPS = 50
LR = 3e-5


@dataclass(frozen=True)
class Case:
    """How the trainer computes, how weights travel, and to how many machines."""

    tensor: int
    precision: str
    tied: bool
    encoding: str
    readers: int
    lora: bool = False
    apart: bool = False
    """Whether the ranks are on two nodes."""
    pipeline: int = 1

    def __str__(self) -> str:
        tied = "tied" if self.tied else "untied"
        kind = "-lora" * self.lora + "-apart" * self.apart
        return f"tp{self.tensor}-{self.precision}-{tied}-{self.encoding}-{self.readers}{kind}"


FIRST, SECOND = Case(2, "bfloat16", True, "delta", 3), Case(1, "float32", False, "dense", 1)
ADAPTERS = [Case(2, "bfloat16", True, "delta", 1, lora=True), Case(1, "float32", False, "delta", 1, lora=True)]
APART = Case(2, "bfloat16", True, "delta", 1, apart=True)
STAGES_APART = Case(1, "bfloat16", False, "delta", 1, apart=True, pipeline=2)
SAMPLED = [FIRST, *(pytest.param(case, marks=pytest.mark.slow) for case in (SECOND, *ADAPTERS, APART, STAGES_APART))]
"""What the others would find, these two nearly always find, too."""
MATRIX = [
    case
    for case in itertools.starmap(
        Case, itertools.product((1, 2), ("bfloat16", "float32"), (True, False), ("dense", "delta"), (1, 3))
    )
    if case not in (FIRST, SECOND)
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Their folder."""
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("case", SAMPLED, ids=str)
def test_every_receiver_maps_the_trainers_bits_after_each_of_fifty_steps(
    case: Case, models: Path, tmp_path: Path
) -> None:
    [versions] = train(tmp_path, [case], models)
    assert_identical(case, versions)


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_and_so_in_every_combination(tensor: int, models: Path, tmp_path: Path) -> None:
    cases = [case for case in MATRIX if case.tensor == tensor]
    for case, versions in zip(cases, train(tmp_path, cases, models), strict=True):
        assert_identical(case, versions)


def train(folder: Path, cases: list[Case], models: Path) -> list[list[dict[str, Any]]]:
    """What both sides held, version by version. All cases in one start of the trainer."""
    families = {True: "qwen2", False: "qwen2-untied"}
    prepared = [prepare(folder, case, make_model(models, families[case.tied])) for case in cases]
    (folder / "cases.json").write_text(json.dumps(prepared))
    launch("published_steps", cases[0].tensor * cases[0].pipeline, folder / "cases.json", timeout_s=500)
    return [[json.loads(line) for line in (folder / f"{case}.jsonl").read_text().splitlines()] for case in cases]


def prepare(folder: Path, case: Case, model: Path) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "name": str(case).ljust(64, "-"),  # the longest that is allowed: sockets have it in their paths
        "runs_dir": str(folder),
        "model": {"random": {}, "precision": case.precision, "lora": {"rank": 4} if case.lora else None},
        "rollout": {"vllm": {"max_model_len": 110}},
        "weights": {"encoding": case.encoding, "chunk_bytes": 8192, "heartbeat_s": 0.3},
        "trainer": {
            "processes": case.tensor * case.pipeline,
            "tensor_parallel": case.tensor,
            "pipeline_parallel": case.pipeline,
            "micro_batch_tokens": 440,
            "optimizer": {"lr": LR},
        },
    }
    config = folder / f"{case}.yaml"
    config.write_text(dump(validate(raw, "test")))
    files = {"config": str(config), "model": str(model), "out": str(folder / f"{case}.jsonl")}
    return {**files, "readers": case.readers, "steps": STEPS, "apart": case.apart}


def assert_identical(case: Case, versions: list[dict[str, Any]]) -> None:
    assert [entry["version"] for entry in versions] == list(range(STEPS + 1))
    for entry in versions:
        assert len(entry["readers"]) == case.readers
        for said in entry["readers"]:
            assert said["version"] == entry["version"], case
            assert said["hashes"] == entry["hashes"], (case, entry["version"])
    for before, after in itertools.pairwise(versions):  # else it would be no proof
        assert before["hashes"] != after["hashes"], case
    for said in versions[-1]["readers"]:
        patched_share = said["patched"] / (said["patched"] + said["dense"])
        assert patched_share == 0 if case.encoding == "dense" else patched_share > 0.9, case
