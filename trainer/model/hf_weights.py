"""Loads Hugging Face tensors into this rank's Megatron parameters, and exports them again.

Both directions go tensor by tensor: no rank ever holds two copies of the model. `RankShard` knows where the parts lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from transformers import PretrainedConfig

from async_grpo.errors import DataError
from async_grpo.models.shapes import ModelShape, shape_of
from trainer.model.checks import check_known, check_tensor
from trainer.model.shards import RankPosition, RankShard
from trainer.model.weight_map import ShardRule, WeightRule, find_weight, stage_weights


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
    shape, filled = shape_of(hf), set()
    for weight in _own_weights(hf):
        full = {name: _checked(tensors, name, size) for name, size in zip(weight.hf, weight.shapes, strict=True)}
        shard = RankShard(weight, *_tensor_rank_of(weight))
        targets, sources = shard.parameter_views(parameters, shape), shard.tensor_views(full, shape)
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        filled.add(find_weight(weight.megatron, parameters)[0])
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
    shape, positions, own_rank = shape_of(hf), find_positions(), dist.get_rank()
    parameters = dict(model.named_parameters())
    for stage, weight in weights:
        source = next(rank for rank, each in enumerate(positions) if each.sends(stage, weight.holder))
        full: list[Tensor] = []
        if positions[own_rank].has_part(stage, weight.holder):
            _, part = find_weight(weight.megatron, parameters)
            full = _gather(part, weight, shape)
        if source != 0:
            full = _to_first_rank(full, weight, source, model.config.params_dtype)
        if own_rank == 0:
            yield from zip(weight.hf, full, strict=True)


def _own_weights(hf: PretrainedConfig) -> list[WeightRule]:
    weights = stage_weights(
        hf,
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
    return [w for w in weights if w.holder in (None, parallel_state.get_expert_model_parallel_rank())]


def _tensor_rank_of(weight: WeightRule) -> tuple[int, int]:
    """(rank, ranks) over which the parameter is split; an expert is whole."""
    if weight.holder is not None:
        return 0, 1
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def _checked(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = tensors.get(name)
    check_tensor(name, None if tensor is None else tensor.shape, shape)
    assert tensor is not None
    return tensor


def _gather(parameter: Tensor, weight: WeightRule, shape: ModelShape) -> list[Tensor]:
    """The full tensors, on every rank that has a part of the parameter."""
    if weight.rule is ShardRule.WHOLE:
        return [parameter.data]
    parts = [parameter.data]
    _, ranks = _tensor_rank_of(weight)
    if ranks > 1:
        parts = [torch.empty_like(parameter.data) for _ in range(ranks)]
        dist.all_gather(parts, parameter.data.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    full = {name: parameter.data.new_empty(size) for name, size in zip(weight.hf, weight.shapes, strict=True)}
    for rank, part in enumerate(parts):
        shard = RankShard(weight, rank, ranks)
        sources = shard.parameter_views({weight.megatron: part}, shape)
        for target, source in zip(shard.tensor_views(full, shape), sources, strict=True):
            target.copy_(source)
    return list(full.values())


def _to_first_rank(full: list[Tensor], weight: WeightRule, source: int, dtype: torch.dtype) -> list[Tensor]:
    """Send from rank `source` to rank 0; the received tensors there, what was given elsewhere."""
    if dist.get_rank() == source:
        for tensor in full:
            dist.send(tensor.contiguous(), 0)
    if dist.get_rank() == 0:
        full = [torch.empty(shape, dtype=dtype, device=torch.cuda.current_device()) for shape in weight.shapes]
        for tensor in full:
            dist.recv(tensor, source)
    return full
