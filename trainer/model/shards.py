"""Maps each rank's part of a parameter to the full Hugging Face tensors, and assigns the parts to copy to ranks.

    parameter of a rank --parameter_views--> copy --> tensor_views of the full tensors      export, publication
                        <-- copy <--                                                        loading

A `RankShard` gives matching views of both sides, so every conversion is a loop of copies. To publish a version, every
rank copies its own parts into a slot, without a gather.

Replicas (data and context parallel) have the same values, so each of them copies some of the tensors: a tensor is
assigned to the replica with the fewest elements so far. With several nodes, replicas on the node of rank 0 are
preferred, because all others must send their parts to that node.
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
    """Position of a rank in the parallel layout.

    Experts have their own replica numbers, because other ranks have copies of them.
    """

    stage: int
    """Pipeline stage."""
    tensor: int
    """Tensor-parallel rank."""
    replica: int
    """Number among the ranks with copies of the same dense tensors."""
    expert: int
    """Expert-parallel rank."""
    expert_replica: int
    """Number among the ranks with copies of the same experts."""

    def has_part(self, stage: int, expert_rank: int | None) -> bool:
        """True if the rank takes part in gathering a tensor of `stage`; only the first replica does.

        `expert_rank`: expert-parallel rank that has the tensor; None for a tensor outside the experts.
        """
        if self.stage != stage:
            return False
        if expert_rank is None:
            return self.replica == 0
        return self.expert == expert_rank and self.expert_replica == 0

    def sends(self, stage: int, expert_rank: int | None) -> bool:
        """True if the rank sends the whole tensor to rank 0."""
        return self.has_part(stage, expert_rank) and (expert_rank is not None or self.tensor == 0)


@dataclass(frozen=True, slots=True)
class RankShard:
    """The part of one parameter on tensor-parallel rank `rank` of `ranks`."""

    weight: WeightRule
    rank: int
    ranks: int

    def tensor_views(self, full: Mapping[str, Tensor], shape: ModelShape) -> list[Tensor]:
        """Return the part of each tensor of the parameter, as views of the tensors in `full`, by Hugging Face name."""
        return [self._tensor_view(full[name], shape) for name in self.weight.hf]

    def parameter_views(self, parameters: Mapping[str, Tensor], shape: ModelShape) -> Sequence[Tensor]:
        """Return the same parts, with the same shapes, as views of this rank's parameter."""
        parameter = find_weight(self.weight.megatron, parameters)[1].detach()
        if self.weight.rule is ShardRule.GATE_UP:
            return parameter.chunk(2, 0)
        if self.weight.rule is ShardRule.QKV:
            dim = shape.head_dim
            by_group = parameter.unflatten(0, (shape.groups // self.ranks, -1))
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


Kind = tuple[int, int | None]
"""(stage, expert rank) of tensors that have the same replicas. Expert rank None: all tensors outside the experts."""

ReplicaLoads = dict[Kind, dict[int, int]]
"""Kind -> replica -> number of elements that it copies."""


def assign_shards(
    hf: PretrainedConfig, positions: Sequence[RankPosition], local: Collection[int]
) -> list[list[RankShard]]:
    """Return the shards that each rank copies, by rank.

    Every element of the model is copied by exactly one rank, by one of the ranks `local` if they have it.
    """
    stages = 1 + max(position.stage for position in positions)
    tensor_ranks = 1 + max(position.tensor for position in positions)
    expert_ranks = 1 + max(position.expert for position in positions)
    loads = _find_copying_replicas(positions, local)
    shards_of_rank: list[list[RankShard]] = [[] for _ in positions]

    for weight, stage, replica in _assign_replicas(hf, loads, stages, expert_ranks):
        is_split = weight.expert_rank is None and weight.rule is not ShardRule.WHOLE
        ranks = tensor_ranks if is_split else 1
        for rank, position in enumerate(positions):
            if position.stage != stage:
                continue
            if weight.expert_rank is not None:
                tensor_rank = 0
                is_assigned = position.expert == weight.expert_rank and position.expert_replica == replica
            else:
                tensor_rank = position.tensor
                is_assigned = position.replica == replica and tensor_rank < ranks
            if is_assigned:
                shards_of_rank[rank].append(RankShard(weight, tensor_rank, ranks))

    _check_all_assigned(hf, shards_of_rank, stages)
    return shards_of_rank


def _check_all_assigned(hf: PretrainedConfig, shards_of_rank: Sequence[Sequence[RankShard]], stages: int) -> None:
    # A weight that no rank copies would keep the bytes of an older version, and its hashes would match those bytes.
    assigned = sum(
        sum(map(math.prod, shard.weight.shapes)) // shard.ranks for shards in shards_of_rank for shard in shards
    )
    published = sum(math.prod(shape) for _, shape in model_tensors(hf, stages))
    assert assigned == published, f"the ranks copy {assigned} of {published} elements of the model"


def _find_copying_replicas(positions: Sequence[RankPosition], local: Collection[int]) -> ReplicaLoads:
    """Return the replicas that copy each kind of tensor: those complete on the ranks `local`, otherwise all."""
    tensor_ranks = 1 + max(position.tensor for position in positions)
    all_replicas = _find_complete_replicas(positions, tensor_ranks)
    local_replicas = _find_complete_replicas([positions[rank] for rank in local], tensor_ranks)
    return {kind: dict.fromkeys(local_replicas.get(kind) or all_replicas[kind], 0) for kind in all_replicas}


def _find_complete_replicas(positions: Sequence[RankPosition], tensor_ranks: int) -> dict[Kind, set[int]]:
    """Return the replicas of which these ranks have all tensor-parallel parts."""
    part_counts = Counter((position.stage, position.replica) for position in positions)
    replicas: dict[Kind, set[int]] = defaultdict(set)
    for position in positions:
        replicas[position.stage, position.expert].add(position.expert_replica)
        if part_counts[position.stage, position.replica] == tensor_ranks:
            replicas[position.stage, None].add(position.replica)
    return replicas


def _assign_replicas(
    hf: PretrainedConfig, loads: ReplicaLoads, stages: int, expert_ranks: int
) -> Iterator[tuple[WeightRule, int, int]]:
    """Yield (exported parameter, its stage, the replica that copies it), and add to the replica's load."""
    for stage in range(stages):
        for weight in stage_weights(hf, stage, stages, expert_ranks):
            if weight.exported:
                load = loads[stage, weight.expert_rank]
                replica = min(load, key=lambda replica: (load[replica], replica))
                load[replica] += sum(map(math.prod, weight.shapes))
                yield weight, stage, replica
