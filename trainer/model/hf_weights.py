"""Loads Hugging Face tensors into this rank's Megatron parameters, and exports them again.

Both directions go tensor by tensor: no rank ever holds two copies of the model. A `RankPosition` tells whether its rank
has a part of a tensor, and whether it sends the tensor to rank 0 in an export.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from transformers import PretrainedConfig

from async_grpo.errors import DataError
from trainer.model.checks import check_known, check_tensor
from trainer.model.families import head_dim
from trainer.model.weight_map import ShardRule, WeightRule, find_weight, stage_weights


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
        """Whether the rank takes part in gathering a tensor of `stage`: its first replica does. `holder`: see
        `WeightRule`."""
        if self.stage != stage:
            return False
        return self.replica == 0 if holder is None else (self.expert, self.expert_replica) == (holder, 0)

    def sends(self, stage: int, holder: int | None) -> bool:
        """Whether the rank sends the whole tensor to rank 0."""
        return self.has_part(stage, holder) and (holder is not None or self.tensor == 0)


def find_positions() -> list[RankPosition]:
    """Gather the positions of all ranks, by rank; all ranks call this together."""
    position = [
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_data_parallel_rank(),
    ]
    positions = [torch.empty(len(position), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(positions, torch.tensor(position))
    return [RankPosition(*found.tolist()) for found in positions]


@torch.no_grad()
def load_hf(model: GPTModel, hf: PretrainedConfig, tensors: Mapping[str, Tensor]) -> None:
    """Fill the parameters of this rank, all but adapters. Raises DataError for a tensor that is missing, misshapen or
    not known."""
    check_known(tensors, hf)
    parameters = {name: parameter for name, parameter in model.named_parameters() if ".adapter." not in name}
    filled = set()
    for weight in _own_weights(hf):
        full = [_checked(tensors, name, shape) for name, shape in zip(weight.hf, weight.shapes, strict=True)]
        rank, ranks = _tensor_shard_of(weight)
        name, target = find_weight(weight.megatron, parameters)
        target.copy_(shard(weight.rule, full, hf.num_key_value_heads, rank, ranks))
        filled.add(name)
    if missing := parameters.keys() - filled:
        raise DataError(f"no Hugging Face tensor is known for {', '.join(sorted(missing))}: the model was not filled")


def export_hf(model: GPTModel, hf: PretrainedConfig) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of the whole model, without adapters, on global rank 0; nothing on the other ranks, which
    take part (`gathered`)."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    expert_ranks = parallel_state.get_expert_model_parallel_world_size()
    weights = [(stage, each) for stage in range(stages) for each in stage_weights(hf, stage, stages, expert_ranks)]
    yield from gathered(model, hf, [(stage, weight) for stage, weight in weights if weight.exported])


@torch.no_grad()
def gathered(
    model: GPTModel, hf: PretrainedConfig, weights: Sequence[tuple[int, WeightRule]]
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor) of the `weights`, each with its pipeline stage, on global rank 0.

    All ranks must iterate to the end: a tensor is gathered over the tensor-parallel ranks of its stage, or is
    whole on the expert-parallel rank that has it, and is then sent to rank 0 by the first of them.
    """
    positions, own_rank = find_positions(), dist.get_rank()
    parameters = dict(model.named_parameters())
    for stage, weight in weights:
        source = next(rank for rank, each in enumerate(positions) if each.sends(stage, weight.holder))
        full = None
        if positions[own_rank].has_part(stage, weight.holder):
            _, part = find_weight(weight.megatron, parameters)
            full = _gather(part, weight, hf)
        if source != 0:
            full = _to_first_rank(full, weight, source, model.config.params_dtype)
        if own_rank == 0:
            assert full is not None
            yield from zip(weight.hf, full, strict=True)


def shard(rule: ShardRule, full: Sequence[Tensor], groups: int, rank: int, ranks: int) -> Tensor:
    """Cut rank `rank`'s part of a parameter out of the full Hugging Face tensors."""
    if rule is ShardRule.WHOLE:
        return full[0]
    if rule is ShardRule.ROWS:
        return full[0].chunk(ranks, 0)[rank]
    if rule is ShardRule.COLUMNS:
        return full[0].chunk(ranks, 1)[rank]
    if rule is ShardRule.GATE_UP:
        return torch.cat([tensor.chunk(ranks, 0)[rank] for tensor in full])
    return _interleave(full, groups).chunk(ranks, 0)[rank]


def unshard(rule: ShardRule, parts: Sequence[Tensor], groups: int, head_dim: int) -> list[Tensor]:
    """Join the parts of all ranks to the full Hugging Face tensors: the inverse of `shard`."""
    if rule is ShardRule.WHOLE:
        return [parts[0]]
    if rule is ShardRule.ROWS:
        return [torch.cat(list(parts))]
    if rule is ShardRule.COLUMNS:
        return [torch.cat(list(parts), 1)]
    if rule is ShardRule.GATE_UP:
        gates, ups = zip(*(part.chunk(2, 0) for part in parts), strict=True)
        return [torch.cat(gates), torch.cat(ups)]
    return _separate(torch.cat(list(parts)), groups, head_dim)


def _interleave(qkv: Sequence[Tensor], groups: int) -> Tensor:
    """q [heads * d, ...], k and v [groups * d, ...] -> [groups * (heads per group + 2) * d, ...]"""
    dim, tail = qkv[1].shape[0] // groups, qkv[1].shape[1:]
    return torch.cat([part.reshape(groups, -1, dim, *tail) for part in qkv], 1).reshape(-1, *tail)


def _separate(merged: Tensor, groups: int, head_dim: int) -> list[Tensor]:
    """The inverse of `_interleave`: query, key, value."""
    tail = merged.shape[1:]
    by_group = merged.reshape(groups, -1, head_dim, *tail)
    heads = by_group.shape[1] - 2
    return [part.reshape(-1, *tail) for part in by_group.split([heads, 1, 1], 1)]


def _own_weights(hf: PretrainedConfig) -> list[WeightRule]:
    weights = stage_weights(
        hf,
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
    return [w for w in weights if w.holder in (None, parallel_state.get_expert_model_parallel_rank())]


def _tensor_shard_of(weight: WeightRule) -> tuple[int, int]:
    """(rank, ranks) over which the parameter is split; an expert is whole."""
    if weight.holder is not None:
        return 0, 1
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def _checked(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = tensors.get(name)
    check_tensor(name, None if tensor is None else tensor.shape, shape)
    assert tensor is not None
    return tensor


def _gather(parameter: Tensor, weight: WeightRule, hf: PretrainedConfig) -> list[Tensor]:
    """The full tensors, on every rank that has a part of the parameter."""
    parts = [parameter.data]
    _, ranks = _tensor_shard_of(weight)
    if weight.rule is not ShardRule.WHOLE and ranks > 1:
        parts = [torch.empty_like(parameter.data) for _ in range(ranks)]
        dist.all_gather(parts, parameter.data.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return unshard(weight.rule, parts, hf.num_key_value_heads, head_dim(hf))


def _to_first_rank(
    full: list[Tensor] | None, weight: WeightRule, source: int, dtype: torch.dtype
) -> list[Tensor] | None:
    """Send from rank `source` to rank 0; the received tensors there, what was given elsewhere."""
    if dist.get_rank() == source:
        assert full is not None
        for tensor in full:
            dist.send(tensor.contiguous(), 0)
    if dist.get_rank() == 0:
        full = [torch.empty(shape, dtype=dtype, device=torch.cuda.current_device()) for shape in weight.shapes]
        for tensor in full:
            dist.recv(tensor, source)
    return full
