"""Every byte of the model is copied by one rank, and goes where gathering would put it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen3MoeConfig

from async_grpo.models.shapes import shape_of
from trainer.model import shards as module
from trainer.model.shards import RankPosition, RankShard, assign_shards
from trainer.model.weight_map import ShardRule, model_tensors, stage_weights

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
    "pipeline 2, data 2": (DENSE, [RankPosition(rank // 2, 0, rank % 2, 0, rank % 2) for rank in range(4)]),
    "tensor 2, data 2": (DENSE, [RankPosition(0, rank % 2, rank // 2, 0, rank) for rank in range(4)]),
    "experts 2, data 4": (EXPERTS, [RankPosition(0, 0, rank, rank % 2, rank // 2) for rank in range(4)]),
    "experts 2, tensor 2": (EXPERTS, [RankPosition(0, rank, 0, rank, 0) for rank in range(2)]),
}


def copy_all(shards: list[RankShard], parameters: dict[str, torch.nn.Parameter], full: Any, hf: Any) -> int:
    """Copy the shards of a rank into the full tensors; how many numbers they have."""
    elements, shape = 0, shape_of(hf)
    for each in shards:
        for target, source in zip(each.tensor_views(full, shape), each.parameter_views(parameters, shape), strict=True):
            target.copy_(source)
            elements += source.numel()
    return elements


def cut_out(rule: ShardRule, full: list[torch.Tensor], groups: int, rank: int, ranks: int) -> torch.Tensor:
    """A rank's parameter as Megatron lays it out, written apart from the code: by concatenation, not by views."""
    if rule is ShardRule.WHOLE:
        return full[0]
    if rule is ShardRule.QKV:
        per_group = [part.reshape(groups, -1, *part.shape[1:]) for part in full]
        fused = torch.cat(per_group, 1)[rank * groups // ranks : (rank + 1) * groups // ranks]
        return fused.reshape(-1, *full[0].shape[1:])
    return torch.cat([part.chunk(ranks, 1 if rule is ShardRule.COLUMNS else 0)[rank] for part in full])


def parameters_of(hf: Any, positions: list[RankPosition], rank: int, full: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters of a rank, cut out of the full tensors."""
    at, found = positions[rank], {}
    stages, experts = 1 + max(p.stage for p in positions), 1 + max(p.expert for p in positions)
    ranks = 1 + max(p.tensor for p in positions)
    for weight in stage_weights(hf, at.stage, stages, experts):
        if weight.expert_rank in (None, at.expert):
            cut = (at.tensor, ranks) if weight.expert_rank is None else (0, 1)
            part = cut_out(weight.rule, [full[name] for name in weight.hf], hf.num_key_value_heads, *cut)
            found[weight.megatron] = torch.nn.Parameter(part.clone())
    return found


@pytest.mark.parametrize("near", ["all", "rank 0"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_shards_of_all_ranks_are_the_model_and_none_is_copied_twice(name: str, near: str) -> None:
    hf, positions = LAYOUTS[name]
    shapes = dict(model_tensors(hf, 1 + max(each.stage for each in positions)))
    full = {name: torch.randn(shape) for name, shape in shapes.items()}
    copied = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    assigned = assign_shards(hf, positions, range(len(positions)) if near == "all" else [0])
    elements = 0
    for rank, shards in enumerate(assigned):
        elements += copy_all(shards, parameters_of(hf, positions, rank, full), copied, hf)
    for name, tensor in full.items():
        assert torch.equal(copied[name], tensor), name
    assert elements == sum(tensor.numel() for tensor in full.values())


def test_replicas_share_the_copying() -> None:
    hf, positions = LAYOUTS["data 3"]
    full = {name: torch.zeros(shape) for name, shape in model_tensors(hf, 1)}
    largest = max(map(torch.numel, full.values()))
    counts = [
        copy_all(shards, parameters_of(hf, positions, rank, full), full, hf)
        for rank, shards in enumerate(assign_shards(hf, positions, range(3)))
    ]
    assert max(counts) - min(counts) <= largest


@pytest.mark.parametrize(
    ("name", "local", "copy"),
    [
        ("data 3", [0, 1], [0, 1]),
        ("tensor 2, data 2", [0, 1], [0, 1]),
        ("tensor 2, data 2", [1, 2, 3], [2, 3]),
        ("tensor 2, data 2", [0, 2], [0, 1, 2, 3]),  # none is whole there: all replicas share
        ("experts 2, data 4", [0, 1], [0, 1]),
        ("experts 2, data 4", [0, 2], [0, 1, 2, 3]),  # of the experts 1, 3, ... those ranks have none
        ("pipeline 2, tensor 2", [0, 1], [0, 1, 2, 3]),
        ("pipeline 2, data 2", [0, 1, 2], [0, 1, 2]),
    ],
)
def test_the_ranks_of_one_node_copy_what_they_have_whole_and_others_the_rest(
    name: str, local: list[int], copy: list[int]
) -> None:
    hf, positions = LAYOUTS[name]
    assigned = assign_shards(hf, positions, local)
    assert [rank for rank, shards in enumerate(assigned) if shards] == copy


def test_a_weight_that_no_rank_would_copy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    hf, positions = LAYOUTS["one"]
    assign_replicas = module._assign_replicas
    monkeypatch.setattr(module, "_assign_replicas", lambda *arguments: list(assign_replicas(*arguments))[1:])
    with pytest.raises(AssertionError, match="the ranks copy"):
        assign_shards(hf, positions, [0])
