"""Models of full width and layouts of 64 ranks, without numbers: memory, shapes, the order of collectives, idle ranks.

Every rank is built and makes a step over fake tensors and fake process groups
(tests/support/trainer_programs/fake_ranks.py). Of the shipped configurations, one rank is built with all layers (a
mixture of experts with 4 of them, to save time); of the layouts of 64 ranks all ranks, with one layer a stage.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from async_grpo.config import load
from async_grpo.models.shapes import SHAPES, shape_of
from tests.support.trainer_programs.launching import ROOT
from trainer.platform.memory import dense_replicas, expert_replicas, trainer_memory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
CONFIGS = ROOT / "configs"
SHIPPED = sorted(
    path.stem
    for pattern in ("*_deepscaler_cuda", "*_deepscaler_ascend", "*_one_*")
    for path in CONFIGS.glob(f"{pattern}.yaml")
)
EXPERT_LAYERS = 4
LARGE: dict[str, tuple[str, dict[str, int]]] = {
    "7b": ("qwen2.5_7b_gsm8k_cuda", {"tensor_parallel": 4, "context_parallel": 2}),
    "32b": ("qwen2.5_32b_deepscaler_ascend", {"tensor_parallel": 8, "pipeline_parallel": 2}),
    "30b-a3b": ("qwen3_30b_a3b_deepscaler_ascend", {"tensor_parallel": 4, "expert_parallel": 16}),
}
"""Layouts of 64 ranks: TP 4 x CP 2 x DP 8, TP 8 x PP 2 x DP 4, TP 4 x DP 16 with EP 16."""
RANKS = 64
"""Of a layout above."""
VARIANTS: dict[str, dict[str, Any]] = {
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "entropy": {"objective": {"entropy_coef": 0.1}},
    "pipeline": {"processes": 8, "tensor_parallel": 2, "pipeline_parallel": 2},
    "context": {"processes": 16, "context_parallel": 4},
    "whole": {"processes": 1, "tensor_parallel": 1, "sequence_parallel": False},
}
"""Other settings of the 7B configuration, on both platforms."""


def hugging_face(architecture: str, layers: int | None = None) -> dict[str, Any]:
    """The fields of the public config.json."""
    shape = SHAPES[architecture]
    fields: dict[str, Any] = {
        "model_type": "qwen3_moe" if shape.experts else "qwen2",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": layers or shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.groups,
        "intermediate_size": shape.ffn,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": shape.tied,
    }
    if shape.experts:
        own = {"num_experts": shape.experts, "num_experts_per_tok": shape.experts_per_token, "head_dim": shape.head_dim}
        fields |= {**own, "moe_intermediate_size": shape.ffn, "norm_topk_prob": True}
    return fields


def case(folder: Path, name: str, config: str, trainer: dict[str, Any], ranks: list[int], layers: int | None) -> Any:
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps({"base": [str(CONFIGS / f"{config}.yaml")], "trainer": trainer}))
    architecture = load(file).model.architecture
    assert architecture is not None
    return {"config": str(file), "shape": hugging_face(architecture, layers), "ranks": ranks}


def make(folder: Path, wanted: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """By case: what was found of each of its ranks, with the case."""
    listed, out = folder / "cases.json", folder / "out.json"
    listed.write_text(json.dumps([*wanted.values()]))
    program = [sys.executable, "-m", "tests.support.trainer_programs.fake_ranks", str(listed), str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(program, check=True, env=environment, timeout=1400, cwd=ROOT)
    found = zip(wanted.items(), json.loads(out.read_text()), strict=True)
    return {name: [rank | {"case": case} for rank in ranks] for (name, case), ranks in found}


@pytest.fixture(scope="module")
def one_rank_of_each(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("planned")
    layers = {name: EXPERT_LAYERS if "a3b" in name else None for name in SHIPPED}
    wanted = {name: case(folder, name, name, {}, [0], layers[name]) for name in SHIPPED}
    for platform in ("cuda", "ascend"):
        for variant, trainer in VARIANTS.items():
            name = f"{variant} {platform}"
            ranks = [0, trainer["processes"] // 2] if "pipeline_parallel" in trainer else [0]
            wanted[name] = case(folder, name, f"qwen2.5_7b_gsm8k_{platform}", trainer, ranks, 4)
    return make(folder, wanted)


@pytest.fixture(scope="module", params=LARGE)
def all_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of one of the layouts of 64 ranks."""
    folder, (config, layout) = tmp_path_factory.mktemp("large"), LARGE[request.param]
    trainer = {"processes": RANKS, **layout}
    wanted = {"": case(folder, "large", config, trainer, [*range(RANKS)], layout.get("pipeline_parallel", 1))}
    return make(folder, wanted)[""]


PLANNED = [*SHIPPED, *(f"{variant} {platform}" for variant in VARIANTS for platform in ("cuda", "ascend"))]


@pytest.mark.parametrize("name", PLANNED)
def test_a_rank_needs_what_the_plan_says(one_rank_of_each: dict[str, list[dict[str, Any]]], name: str) -> None:
    ranks = one_rank_of_each[name]
    config = load(Path(ranks[0]["case"]["config"]))
    planned = trainer_memory(config, shape_of(ranks[0]["case"]["shape"]))
    offload = config.trainer.optimizer.offload
    optimizers = [0 if offload else rank["optimizer"] for rank in ranks]
    held = [rank["weights"] + rank["gradients"] + rank["peak"] for rank in ranks]
    most = max(sum(pair) for pair in zip(held, optimizers, strict=True))
    step = max(planned.activations + planned.work_space, planned.fetched)
    assert planned.weights + planned.gradients + planned.optimizer + step == pytest.approx(most, rel=0.05)
    assert planned.weights == pytest.approx(max(rank["weights"] for rank in ranks), rel=0.001)
    assert planned.gradients == pytest.approx(max(rank["gradients"] for rank in ranks), rel=0.001)
    assert planned.optimizer == pytest.approx(max(optimizers), rel=0.001)


def test_all_ranks_of_a_group_call_the_same_collectives_in_the_same_order(all_ranks: list[dict[str, Any]]) -> None:
    called: dict[tuple[int, ...], dict[int, list[Any]]] = defaultdict(dict)
    for rank, found in enumerate(all_ranks):
        for kind, group, size, dtype, *peer in found["collectives"]:
            if not peer:
                called[tuple(group)].setdefault(rank, []).append((kind, size, dtype))
    assert max(len(group) for group in called) == RANKS
    for group, by_rank in called.items():
        assert sorted(by_rank) == sorted(group), "a rank would be waited for"
        assert all(calls == by_rank[group[0]] for calls in by_rank.values())


def test_what_a_stage_sends_the_other_receives(all_ranks: list[dict[str, Any]]) -> None:
    between: dict[str, dict[tuple[int, int], list[Any]]] = {"isend": defaultdict(list), "irecv": defaultdict(list)}
    for rank, found in enumerate(all_ranks):
        for kind, _, size, dtype, *peer in found["collectives"]:
            if peer:
                ends = (rank, *peer) if kind == "isend" else (*peer, rank)
                between[kind][ends].append((size, dtype))
    stages = load(Path(all_ranks[0]["case"]["config"])).trainer.pipeline_parallel
    assert len(between["isend"]) == (RANKS if stages == 2 else 0)  # each sends to its opposite
    assert between["isend"] == between["irecv"]


def test_no_rank_is_idle_and_all_together_have_the_model_once_a_replica(all_ranks: list[dict[str, Any]]) -> None:
    wanted = all_ranks[0]["case"]
    layout, shape = load(Path(wanted["config"])).trainer, shape_of(wanted["shape"])
    assert {rank["micro_batches"] for rank in all_ranks} == {2 * layout.pipeline_parallel}
    assert min(rank["weights"] for rank in all_ranks) > 0 and min(rank["optimizer"] for rank in all_ranks) > 0
    experts = [_numbers(rank, ".experts.") for rank in all_ranks]
    copies = expert_replicas(layout) if shape.experts else 1
    assert sum(experts) == copies * shape.layers * shape.expert_layer_parameters
    embeddings = [_numbers(rank, "word_embeddings") + _numbers(rank, "output_layer") for rank in all_ranks]
    assert sum(embeddings) == dense_replicas(layout) * 2 * shape.embedding_parameters
    moments = sum(rank["optimizer"] for rank in all_ranks) // 12
    assert moments == pytest.approx(shape.parameters, rel=0.01)  # norms are repeated, buffers are padded


def _numbers(rank: dict[str, Any], part: str) -> int:
    return sum(math.prod(shape) for name, shape in rank["parameters"].items() if part in name)
