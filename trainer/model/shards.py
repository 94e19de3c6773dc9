"""Where the part of a tensor-parallel rank lies in the full Hugging Face tensors, and which rank copies which part.

    parameter of a rank --parameter_views--> copy --> tensor_views of the full tensors      export, publication
                        <-- copy <--                                                        loading

A `RankShard` gives views of both sides that match one by one, so every conversion is a loop of copies. To publish,
every rank copies its own parts into a slot, and none gathers.

Replicas (data and context parallel) hold the same values. So each of them copies some of the tensors: a tensor is given
to the one with the fewest bytes so far. Of a trainer on several nodes, the replicas on the node of rank 0 copy, where
it has one of the tensor.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PretrainedConfig

from async_grpo.models.shapes import ModelShape
from trainer.model.weight_map import ShardRule, WeightRule, find_weight, model_tensors, stage_weights


@dataclass(frozen=True, slots=True)
class RankPosition:
    """The position of a rank in the layout.

    Replicas of a tensor are counted apart for experts, which other ranks share.
    """

    stage: int
    tensor: int
    replica: int
    expert: int
    expert_replica: int

    def has_part(self, stage: int, holder: int | None) -> bool:
        """True if the rank takes part in gathering a tensor of `stage`, as the first replica does.

        holder: Expert-parallel rank that has the tensor; None for a tensor that is no expert.
        """
        if self.stage != stage:
            return False
        return self.replica == 0 if holder is None else (self.expert, self.expert_replica) == (holder, 0)

    def sends(self, stage: int, holder: int | None) -> bool:
        """True if the rank sends the whole tensor to rank 0."""
        return self.has_part(stage, holder) and (holder is not None or self.tensor == 0)


@dataclass(frozen=True, slots=True)
class RankShard:
    """The part of one parameter that tensor-parallel rank `rank` of `ranks` has."""

    weight: WeightRule
    rank: int
    ranks: int

    def tensor_views(self, full: Mapping[str, Tensor], shape: ModelShape) -> list[Tensor]:
        """The part of each tensor of the parameter, as views of the tensors of `full`, by their Hugging Face names."""
        return [self._tensor_view(full[name], shape) for name in self.weight.hf]

    def parameter_views(self, parameters: Mapping[str, Tensor], shape: ModelShape) -> Sequence[Tensor]:
        """The same parts, of the same shapes, as views of the parameter among `parameters` of the rank."""
        rule, parameter = self.weight.rule, find_weight(self.weight.megatron, parameters)[1].detach()
        if rule is ShardRule.GATE_UP:
            return parameter.chunk(2, 0)
        if rule is ShardRule.QKV:
            by_group, dim = parameter.unflatten(0, (shape.groups // self.ranks, -1)), shape.head_dim
            return by_group.split([by_group.shape[1] - 2 * dim, dim, dim], 1)
        return [parameter]

    def _tensor_view(self, full: Tensor, shape: ModelShape) -> Tensor:
        if self.weight.rule is ShardRule.WHOLE:
            return full
        if self.weight.rule is ShardRule.COLUMNS:
            return full.chunk(self.ranks, 1)[self.rank]
        if self.weight.rule is ShardRule.QKV:
            full = full.unflatten(0, (shape.groups, -1))
        return full.chunk(self.ranks, 0)[self.rank]


Replicas = dict[tuple[int, int | None], dict[int, int]]
"""(stage, holder) -> replica -> bytes that it copies. Without a holder: of the tensors that are not experts."""


def assign_shards(
    hf: PretrainedConfig, positions: Sequence[RankPosition], local: Collection[int]
) -> list[list[RankShard]]:
    """What every rank copies, by rank. Over all ranks every byte of the model is copied once, by one of the ranks
    `local` where they have it."""
    found: list[list[RankShard]] = [[] for _ in positions]
    stages, expert_ranks, tensor_ranks = (
        1 + max(getattr(each, axis) for each in positions) for axis in ("stage", "expert", "tensor")
    )
    for weight, stage, replica in _assigned(hf, _replicas(positions, local), stages, expert_ranks):
        ranks = tensor_ranks if weight.holder is None and weight.rule is not ShardRule.WHOLE else 1
        for rank, at in enumerate(positions):
            if at.stage != stage:
                continue
            if weight.holder is not None:
                tensor, copies = 0, (at.expert, at.expert_replica) == (weight.holder, replica)
            else:
                tensor, copies = at.tensor, at.replica == replica and at.tensor < ranks
            if copies:
                found[rank].append(RankShard(weight, tensor, ranks))
    _check_whole(hf, found, stages)
    return found


def _check_whole(hf: PretrainedConfig, shards: Sequence[Sequence[RankShard]], stages: int) -> None:
    """A weight that no rank is assigned would keep the bytes of an older version, with hashes that are right."""
    assigned = sum(sum(map(math.prod, shard.weight.shapes)) // shard.ranks for part in shards for shard in part)
    published = sum(math.prod(shape) for _, shape in model_tensors(hf, stages))
    assert assigned == published, f"the ranks copy {assigned} of {published} numbers of the model"


def _replicas(positions: Sequence[RankPosition], local: Collection[int]) -> Replicas:
    """The replicas that copy, of each kind: those that are whole among the ranks `local`, or else all."""
    tensor_ranks = 1 + max(each.tensor for each in positions)
    everywhere = _whole(positions, tensor_ranks)
    near = _whole([positions[rank] for rank in local], tensor_ranks)
    return {kind: dict.fromkeys(near.get(kind) or everywhere[kind], 0) for kind in everywhere}


def _whole(positions: Sequence[RankPosition], tensor_ranks: int) -> dict[tuple[int, int | None], set[int]]:
    """The replicas that these ranks have whole."""
    parts = Counter((each.stage, each.replica) for each in positions)
    found: dict[tuple[int, int | None], set[int]] = defaultdict(set)
    for each in positions:
        found[each.stage, each.expert].add(each.expert_replica)
        if parts[each.stage, each.replica] == tensor_ranks:
            found[each.stage, None].add(each.replica)
    return found


def _assigned(
    hf: PretrainedConfig, loads: Replicas, stages: int, expert_ranks: int
) -> Iterator[tuple[WeightRule, int, int]]:
    """Every exported parameter with its stage, and the replica that copies it."""
    for stage in range(stages):
        for weight in stage_weights(hf, stage, stages, expert_ranks):
            if weight.exported:
                load = loads[stage, weight.holder]
                replica = min(load, key=lambda each: (load[each], each))
                load[replica] += sum(map(math.prod, weight.shapes))
                yield weight, stage, replica
