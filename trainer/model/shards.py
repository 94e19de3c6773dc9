"""What this rank holds of the Hugging Face tensors, in place: every rank copies its own parts, and none gathers.

    parameter of this rank --part_of_parameter: views--> HostCopy --> views <--part_of_tensor-- full tensors of a slot

Replicas (data and context parallel) hold the same values. So each of them copies some of the tensors: a tensor is given
to the one with the fewest bytes so far. Of a trainer on several nodes, the replicas on the node of rank 0 copy, if it
has one of every tensor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.core.models.gpt import GPTModel
from torch import Tensor
from transformers import PretrainedConfig

from trainer.model.families import head_dim
from trainer.model.hf_weights import RankPosition
from trainer.model.host_copy import CopyPair
from trainer.model.weight_map import ShardRule, WeightRule, parameter_of, stage_weights


@dataclass(frozen=True, slots=True)
class OwnShard:
    """One parameter that this rank copies: all of it, into its parts of the full tensors."""

    weight: WeightRule
    parameter: Tensor
    rank: int
    ranks: int
    """Of how many tensor-parallel ranks this is the one."""

    def pairs(self, full: Mapping[str, Tensor], hf: PretrainedConfig) -> Iterator[CopyPair]:
        """The parts of the tensors of `full`, by their Hugging Face names, and what is to be copied into them."""
        rule, groups = self.weight.rule, hf.num_key_value_heads
        sources = part_of_parameter(rule, self.parameter.detach(), groups // self.ranks, head_dim(hf))
        for name, source in zip(self.weight.hf, sources, strict=True):
            yield part_of_tensor(rule, full[name], groups, self.rank, self.ranks), source


Replicas = dict[tuple[int, int | None], dict[int, int]]
"""(stage, holder) -> replica -> bytes that it copies. Without a holder: of the tensors that are not experts."""


def local_replicas(positions: Sequence[RankPosition], local: Collection[int]) -> Replicas:
    """The replicas that are whole among the ranks `local`. Empty if some tensor has none there."""
    tensor_ranks = 1 + max(each.tensor for each in positions)
    parts = Counter((each.stage, each.replica) for each in (positions[rank] for rank in local))
    found: Replicas = {(each.stage, holder): {} for each in positions for holder in (None, each.expert)}
    for each in (positions[rank] for rank in local):
        found[each.stage, each.expert][each.expert_replica] = 0
        if parts[each.stage, each.replica] == tensor_ranks:
            found[each.stage, None][each.replica] = 0
    return found if all(found.values()) else {}


def own_shards(
    model: GPTModel, hf: PretrainedConfig, positions: Sequence[RankPosition], rank: int, local: Collection[int]
) -> Iterator[OwnShard]:
    """The parameters that rank `rank`, one of those in `local`, copies. Over all of these every byte of the model is
    copied once."""
    parameters, own = dict(model.named_parameters()), positions[rank]
    stages = 1 + max(each.stage for each in positions)
    expert_ranks = 1 + max(each.expert for each in positions)
    tensor_ranks = 1 + max(each.tensor for each in positions)
    for weight, stage, replica in _assigned(hf, local_replicas(positions, local), stages, expert_ranks):
        if own.stage != stage:
            continue
        if weight.holder is not None:
            tensor, ranks, mine = 0, 1, (own.expert, own.expert_replica) == (weight.holder, replica)
        else:
            tensor, ranks, mine = own.tensor, tensor_ranks, own.replica == replica
        if weight.rule is ShardRule.WHOLE:
            mine, ranks = mine and tensor == 0, 1
        if mine:
            yield OwnShard(weight, parameters[parameter_of(weight.megatron, parameters)], tensor, ranks)


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


def part_of_tensor(rule: ShardRule, full: Tensor, groups: int, rank: int, ranks: int) -> Tensor:
    """The part of a full, contiguous Hugging Face tensor that rank `rank` holds: a view of it."""
    if rule is ShardRule.WHOLE:
        return full
    if rule is ShardRule.COLUMNS:
        return full.chunk(ranks, 1)[rank]
    if rule is ShardRule.QKV:
        return full.view(groups, -1, *full.shape[1:]).chunk(ranks, 0)[rank]
    return full.chunk(ranks, 0)[rank]


def part_of_parameter(rule: ShardRule, parameter: Tensor, groups: int, head_dim: int) -> Sequence[Tensor]:
    """Views of a rank's parameter, one for each of its Hugging Face tensors and shaped as `part_of_tensor` gives it.

    `groups`: of this rank.
    """
    if rule is ShardRule.GATE_UP:
        return parameter.chunk(2, 0)
    if rule is ShardRule.QKV:
        by_group = parameter.view(groups, -1, *parameter.shape[1:])
        return by_group.split([by_group.shape[1] - 2 * head_dim, head_dim, head_dim], 1)
    return [parameter]
