"""Loads Hugging Face tensors into this rank's Megatron parameters, and exports them again.

Both directions go tensor by tensor, so no rank ever has two copies of the model. `RankShard` maps a parameter of one
rank to the parts of Hugging Face tensors that it contains.
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
from trainer.model.checks import check_tensor_shape, check_unknown_tensors
from trainer.model.shards import RankPosition, RankShard
from trainer.model.weight_map import ShardRule, WeightRule, find_weight, stage_weights


def gather_positions() -> list[RankPosition]:
    """Gather the positions of all ranks, by rank. All ranks call this together."""
    own_position = [
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_data_parallel_rank(),
    ]
    positions = [torch.empty(len(own_position), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(positions, torch.tensor(own_position))
    return [RankPosition(*position.tolist()) for position in positions]


@torch.no_grad()
def load_hf_tensors(model: GPTModel, hf: PretrainedConfig, tensors: Mapping[str, Tensor]) -> None:
    """Load all parameters of this rank except adapters.

    Raises DataError for a tensor that is missing, unknown or has the wrong shape.
    """
    check_unknown_tensors(tensors, hf)
    parameters = {name: parameter for name, parameter in model.named_parameters() if ".adapter." not in name}
    shape = shape_of(hf)
    loaded = set()
    for weight in _list_own_weights(hf):
        full = {name: _read_checked(tensors, name, size) for name, size in zip(weight.hf, weight.shapes, strict=True)}
        shard = RankShard(weight, *_tensor_rank_of(weight))
        targets = shard.parameter_views(parameters, shape)
        sources = shard.tensor_views(full, shape)
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        loaded.add(find_weight(weight.megatron, parameters)[0])

    missing = parameters.keys() - loaded
    if missing:
        raise DataError(f"no Hugging Face tensor is known for {', '.join(sorted(missing))}: the model is incomplete")


def export_hf_tensors(model: GPTModel, hf: PretrainedConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) of the whole model without adapters, on global rank 0.

    The other ranks get nothing, but must iterate to the end (`gather_tensors`).
    """
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    expert_ranks = parallel_state.get_expert_model_parallel_world_size()
    exported = [
        (stage, weight)
        for stage in range(stages)
        for weight in stage_weights(hf, stage, stages, expert_ranks)
        if weight.exported
    ]
    yield from gather_tensors(model, hf, exported)


@torch.no_grad()
def gather_tensors(
    model: GPTModel, hf: PretrainedConfig, weights: Sequence[tuple[int, WeightRule]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor) of `weights`, pairs of pipeline stage and weight, on global rank 0.

    All ranks must iterate to the end. A tensor is gathered over the tensor-parallel ranks of its stage (an expert is
    already whole on its expert-parallel rank), and the first of these ranks sends it to rank 0.
    """
    shape = shape_of(hf)
    positions = gather_positions()
    own_rank = dist.get_rank()
    parameters = dict(model.named_parameters())
    for stage, weight in weights:
        source = next(rank for rank, position in enumerate(positions) if position.sends(stage, weight.expert_rank))
        full: list[Tensor] = []
        if positions[own_rank].has_part(stage, weight.expert_rank):
            _, part = find_weight(weight.megatron, parameters)
            full = _gather_full_tensors(part, weight, shape)
        if source != 0:
            full = _send_to_rank_zero(full, weight, source, model.config.params_dtype)
        if own_rank == 0:
            yield from zip(weight.hf, full, strict=True)


def _list_own_weights(hf: PretrainedConfig) -> list[WeightRule]:
    weights = stage_weights(
        hf,
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    return [weight for weight in weights if weight.expert_rank in (None, expert_rank)]


def _tensor_rank_of(weight: WeightRule) -> tuple[int, int]:
    """Return (rank, ranks) of the tensor-parallel split of a parameter. Experts are not split."""
    if weight.expert_rank is not None:
        return 0, 1
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def _read_checked(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = tensors.get(name)
    check_tensor_shape(name, None if tensor is None else tensor.shape, shape)
    assert tensor is not None
    return tensor


def _gather_full_tensors(parameter: Tensor, weight: WeightRule, shape: ModelShape) -> list[Tensor]:
    """Return the full tensors on every rank that has a part of the parameter."""
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


def _send_to_rank_zero(full: list[Tensor], weight: WeightRule, source: int, dtype: torch.dtype) -> list[Tensor]:
    """Send `full` from rank `source` to rank 0. Returns the received tensors on rank 0, and `full` elsewhere."""
    if dist.get_rank() == source:
        for tensor in full:
            dist.send(tensor.contiguous(), 0)
    if dist.get_rank() == 0:
        full = [torch.empty(shape, dtype=dtype, device=torch.cuda.current_device()) for shape in weight.shapes]
        for tensor in full:
            dist.recv(tensor, source)
    return full
