"""Every byte of the model is copied by one rank, and goes where gathering would put it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen3MoeConfig

from trainer.model.hf_weights import RankPosition, shard
from trainer.model.shards import local_replicas, own_shards
from trainer.model.weight_map import model_tensors, stage_weights

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "intermediate_size": 24,
    "vocab_size": 40,
}
DENSE = Qwen2Config(**SIZES)
EXPERTS = Qwen3MoeConfig(**SIZES, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2)
LAYOUTS = {
    "one": (DENSE, [RankPosition(0, 0, 0, 0, 0)]),
    "tensor 4": (DENSE, [RankPosition(0, rank, 0, 0, 0) for rank in range(4)]),
    "data 3": (DENSE, [RankPosition(0, 0, rank, 0, rank) for rank in range(3)]),
    "pipeline 2, tensor 2": (DENSE, [RankPosition(rank // 2, rank % 2, 0, 0, 0) for rank in range(4)]),
    "tensor 2, data 2": (DENSE, [RankPosition(0, rank % 2, rank // 2, 0, rank) for rank in range(4)]),
    "experts 2, data 4": (EXPERTS, [RankPosition(0, 0, rank, rank % 2, rank // 2) for rank in range(4)]),
    "experts 2, tensor 2": (EXPERTS, [RankPosition(0, rank, 0, rank, 0) for rank in range(2)]),
}


class StageModel:
    """The parameters that the rank at `at` has, cut out of the full tensors."""

    def __init__(self, hf: Any, positions: list[RankPosition], at: RankPosition, full: dict[str, torch.Tensor]) -> None:
        self._found = []
        stages, experts = 1 + max(p.stage for p in positions), 1 + max(p.expert for p in positions)
        ranks = 1 + max(p.tensor for p in positions)
        for weight in stage_weights(hf, at.stage, stages, experts):
            if weight.holder in (None, at.expert):
                cut = (at.tensor, ranks) if weight.holder is None else (0, 1)
                part = shard(weight.rule, [full[name] for name in weight.hf], hf.num_key_value_heads, *cut)
                self._found.append((weight.megatron, torch.nn.Parameter(part.clone())))

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return self._found


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_shards_of_all_ranks_are_the_model_and_none_is_copied_twice(name: str) -> None:
    hf, positions = LAYOUTS[name]
    shapes = dict(model_tensors(hf, 1 + max(each.stage for each in positions)))
    full = {name: torch.randn(shape) for name, shape in shapes.items()}
    copied = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    elements = []
    for rank, position in enumerate(positions):
        model: Any = StageModel(hf, positions, position, full)
        shards = list(own_shards(model, hf, positions, rank, range(len(positions))))
        for target, source in (pair for each in shards for pair in each.pairs(copied, hf)):
            target.copy_(source.detach())
        elements.append(sum(each.parameter.numel() for each in shards))
    for name, tensor in full.items():
        assert torch.equal(copied[name], tensor), name
    assert sum(elements) == sum(tensor.numel() for tensor in full.values())


def test_replicas_share_the_copying() -> None:
    hf, positions = LAYOUTS["data 3"]
    full = {name: torch.zeros(shape) for name, shape in model_tensors(hf, 1)}
    largest = max(map(torch.numel, full.values()))
    counts = []
    for rank, position in enumerate(positions):
        model: Any = StageModel(hf, positions, position, full)
        counts.append(
            sum(each.parameter.numel() for each in own_shards(model, hf, positions, rank, range(len(positions))))
        )
    assert max(counts) - min(counts) <= largest


@pytest.mark.parametrize(
    ("name", "local", "copy"),
    [
        ("data 3", [0, 1], [0, 1]),
        ("tensor 2, data 2", [0, 1], [0, 1]),
        ("tensor 2, data 2", [1, 2, 3], [2, 3]),
        ("experts 2, data 4", [0, 1], [0, 1]),
    ],
)
def test_the_ranks_of_one_node_copy_the_whole_model_where_they_have_it(
    name: str, local: list[int], copy: list[int]
) -> None:
    hf, positions = LAYOUTS[name]
    full = {name: torch.randn(shape) for name, shape in model_tensors(hf, 1)}
    copied = {name: torch.full_like(tensor, torch.nan) for name, tensor in full.items()}
    for rank in local:
        model: Any = StageModel(hf, positions, positions[rank], full)
        shards = list(own_shards(model, hf, positions, rank, local))
        assert bool(shards) == (rank in copy)
        for target, source in (pair for each in shards for pair in each.pairs(copied, hf)):
            target.copy_(source.detach())
    assert all(torch.equal(copied[name], tensor) for name, tensor in full.items())


@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("tensor 4", [0, 1]),
        ("pipeline 2, tensor 2", [0, 1]),
        ("experts 2, data 4", [0, 2]),
        ("tensor 2, data 2", [1, 2]),
    ],
)
def test_a_node_without_a_whole_replica_of_every_tensor_copies_nothing(name: str, local: list[int]) -> None:
    assert not local_replicas(LAYOUTS[name][1], local)
