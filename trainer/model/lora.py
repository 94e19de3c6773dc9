"""Low-rank adapters on Megatron's linear layers, equal to PEFT's adapters on the Hugging Face model.

    y = W x + scale * B A x        W [out, in] frozen, A [r, in] kaiming-uniform, B [out, r] initially zero

Megatron fuses query, key and value (and gate and up) into one layer. Here every Hugging Face projection has its own A
and B, and their outputs are concatenated in the order of the fused layer. A forward hook adds an adapter's output to
its layer, so layers of all platforms work, and their parameters keep their names. On tensor-parallel ranks:

    column-parallel layer (q, k, v, gate, up)   A whole, B split by rows      A x is exchanged instead of the input
    row-parallel layer (o, down)                A split by columns, B whole   A x is summed instead of the output

The ranks exchange r numbers per token. With sequence parallelism the whole matrix gets only the tokens of its rank, and
Megatron sums its gradient over the ranks (`sequence_parallel`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import xxhash
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor
from transformers import PretrainedConfig

from async_grpo.config.model import LoraConfig
from async_grpo.models.shapes import shape_of
from async_grpo.weights.lora import DIGEST_BYTES, adapter_names, base_digest, merge_adapters
from trainer.model.hf_weights import export_hf_tensors, gather_tensors
from trainer.model.shards import RankShard
from trainer.model.weight_map import ShardRule, WeightRule, stage_weights

CHILD = "adapter"
"""Name of the adapter module within its layer."""

_ROW_PARALLEL = ShardRule.COLUMNS
"""Rule of a weight whose layer gets a part of the inputs and sums the outputs."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """Configuration of the trained adapters, and their base weights."""

    config: LoraConfig
    base: bytes
    """`base_digest` of the folder with the frozen weights."""

    @classmethod
    def from_config(cls, config: LoraConfig | None, folder: Path) -> Adapters | None:
        """Return the adapters of `config` on the weights in `folder`; None without `config`. All ranks call it."""
        return None if config is None else cls(config, _broadcast_base_digest(folder))

    @property
    def traits(self) -> dict[str, str | int | bool | None]:
        """Values that identify the adapters in a checkpoint's manifest."""
        config = self.config
        return {
            "lora_rank": config.rank,
            "lora_alpha": str(config.peft_alpha),
            "lora_rslora": config.rslora,
            "lora_targets": " ".join(config.targets),
            "lora_base": self.base.hex(),
        }


def _broadcast_base_digest(folder: Path) -> bytes:
    # Only rank 0 computes the digest, because it reads all weights.
    digest = torch.zeros(DIGEST_BYTES, dtype=torch.uint8)
    if dist.get_rank() == 0:
        digest = torch.frombuffer(bytearray(base_digest(folder)), dtype=torch.uint8)
    dist.broadcast(digest, 0)
    return digest.numpy().tobytes()


def stage_adapters(hf: PretrainedConfig, lora: LoraConfig, stage: int, stages: int) -> Iterator[WeightRule]:
    """Yield the rules of A and B of every target of a pipeline stage, in export order."""
    for weight in stage_weights(hf, stage, stages):
        for name, (rows, columns) in _find_targets(weight, lora):
            projection = _projection_name(name)
            adapter = f"{weight.megatron.removesuffix('.weight')}.{CHILD}"
            if weight.rule is _ROW_PARALLEL:
                rule_a = ShardRule.COLUMNS
                rule_b = ShardRule.WHOLE
            else:
                rule_a = ShardRule.WHOLE
                rule_b = ShardRule.ROWS
            name_a, name_b = adapter_names(name)
            yield WeightRule(f"{adapter}.lora_A.{projection}", rule_a, (name_a,), ((lora.rank, columns),))
            yield WeightRule(f"{adapter}.lora_B.{projection}", rule_b, (name_b,), ((rows, lora.rank),))


def _find_targets(weight: WeightRule, lora: LoraConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (Hugging Face name, shape) of the matrices in a parameter that get adapters."""
    suffixes = tuple(f".{target}.weight" for target in lora.targets)
    for name, shape in zip(weight.hf, weight.shapes, strict=True):
        if weight.expert_rank is None and name.endswith(suffixes):
            rows, columns = shape
            yield name, (rows, columns)


def _projection_name(name: str) -> str:
    """
    >>> _projection_name("model.layers.0.self_attn.q_proj.weight")
    'q_proj'
    """
    return name.removesuffix(".weight").rpartition(".")[2]


class LoraAdapter(torch.nn.Module):
    """Adapters of one linear layer of Megatron, which consists of one or several projections."""

    def __init__(self, layer: Any, weight: WeightRule, lora: LoraConfig, hf: PretrainedConfig) -> None:
        super().__init__()
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        self._sequence_parallel = bool(layer.config.sequence_parallel)
        self._is_row_parallel = weight.rule is _ROW_PARALLEL
        self._scale = lora.scale
        self._rank = lora.rank
        self._head_groups = hf.num_key_value_heads // ranks if weight.rule is ShardRule.QKV else 1
        """Number of times that the fused output repeats (query, key, value): once per group of heads on this rank."""
        self._output_widths: dict[str, int] = {}
        """Projection of the layer -> number of its outputs on this rank."""

        targets = dict(_find_targets(weight, lora))
        self.lora_A = torch.nn.ParameterDict()
        self.lora_B = torch.nn.ParameterDict()
        for name, (rows, columns) in zip(weight.hf, weight.shapes, strict=True):
            projection = _projection_name(name)
            inputs = columns // ranks if self._is_row_parallel else columns
            outputs = rows if self._is_row_parallel else rows // ranks
            self._output_widths[projection] = outputs
            if name in targets:
                split_a, split_b = (1, None) if self._is_row_parallel else (None, 0)
                self.lora_A[projection] = self._make_parameter((lora.rank, inputs), layer, split_a)
                self.lora_B[projection] = self._make_parameter((outputs, lora.rank), layer, split_b)

    def _make_parameter(self, shape: tuple[int, int], layer: Any, split: int | None) -> torch.nn.Parameter:
        """`split`: dimension that is split over the tensor-parallel ranks; None if every rank has the whole matrix."""
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=layer.weight.dtype, device=layer.weight.device))
        set_tensor_model_parallel_attributes(parameter, split is not None, -1 if split is None else split, 1)
        parameter.sequence_parallel = self._sequence_parallel and split is None
        return parameter

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the correction to the layer's output [T, 1, out] for its inputs [T, 1, in], split as the layer is."""
        down = self._exchange_over_ranks(F.linear(inputs, torch.cat(list(self.lora_A.values()))))
        down_of_projection = dict(zip(self.lora_A, down.split(self._rank, -1), strict=True))

        outputs = []
        for projection, width in self._output_widths.items():
            if projection in down_of_projection:
                up = F.linear(down_of_projection[projection], self.lora_B[projection])
                outputs.append(up * self._scale)
            else:  # a projection without an adapter in a fused layer
                outputs.append(down.new_zeros(*down.shape[:-1], width))
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat([output.unflatten(-1, (self._head_groups, -1)) for output in outputs], -1).flatten(-2)

    def _exchange_over_ranks(self, down: Tensor) -> Tensor:
        """Return A x as B needs it, from this rank's tokens or this rank's summand."""
        exchanged: Tensor
        if self._is_row_parallel and self._sequence_parallel:
            exchanged = mappings.reduce_scatter_to_sequence_parallel_region(down)
        elif self._is_row_parallel:
            exchanged = mappings.reduce_from_tensor_model_parallel_region(down)
        elif self._sequence_parallel:
            exchanged = mappings.gather_from_sequence_parallel_region(down)
        else:
            exchanged = mappings.copy_to_tensor_model_parallel_region(down)
        return exchanged


def attach_adapters(model: GPTModel, hf: PretrainedConfig, lora: LoraConfig, seed: int) -> None:
    """Freeze the model and add adapters to the targets. The outputs are unchanged, because every B is zero."""
    model.requires_grad_(False)
    modules = dict(model.named_modules())
    for weight in stage_weights(hf, *_pipeline_stage()):
        if any(_find_targets(weight, lora)):
            layer = modules[weight.megatron.removesuffix(".weight")]
            layer.add_module(CHILD, LoraAdapter(layer, weight, lora, hf))
            layer.register_forward_hook(_add_adapter_output)
    _initialise_adapters(model, hf, lora, seed)

    if model.config.recompute_granularity == "full" and hasattr(model, "embedding"):
        # A recomputed block gets no gradient unless one of its inputs requires one, and the embedding is frozen.
        model.embedding.register_forward_hook(lambda _module, _inputs, output: _require_gradient(output))


def _add_adapter_output(layer: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> Any:
    return output[0] + layer.adapter(inputs[0]), *output[1:]


def _require_gradient(output: Tensor) -> Tensor:
    if torch.is_grad_enabled() and not output.requires_grad:
        return output.requires_grad_()
    return output


@torch.no_grad()
def _initialise_adapters(model: GPTModel, hf: PretrainedConfig, lora: LoraConfig, seed: int) -> None:
    """Draw every A as PEFT does, uniform within 1 / sqrt(inputs).

    Each A has its own generator, seeded by its name, so the values do not depend on the layout of the ranks.
    """
    parameters = dict(model.named_parameters())
    shape = shape_of(hf)
    for weight in stage_adapters(hf, lora, *_pipeline_stage()):
        if ".lora_A." not in weight.megatron:
            continue
        (name,) = weight.hf
        (size,) = weight.shapes
        generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) >> 1)
        full = torch.empty(size).uniform_(-1, 1, generator=generator) / math.sqrt(size[1])
        (part,) = RankShard(weight, *_tensor_rank()).tensor_views({name: full}, shape)
        parameters[weight.megatron].copy_(part)


def export_trained(model: GPTModel, hf: PretrainedConfig, adapters: Adapters | None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor on the CPU) of the trained tensors, on global rank 0. Adapters have PEFT's names.

    The other ranks get nothing, but must iterate to the end.
    """
    if adapters is None:
        yield from export_merged(model, hf, None)
        return
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    rules = [(stage, rule) for stage in range(stages) for rule in stage_adapters(hf, adapters.config, stage, stages)]
    for name, tensor in gather_tensors(model, hf, rules):
        yield name, tensor.cpu()


def export_merged(model: GPTModel, hf: PretrainedConfig, adapters: Adapters | None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor on the CPU) of the whole model on global rank 0, with adapters merged into the weights.

    Merges as engines do. The other ranks get nothing, but must iterate to the end.
    """
    adapter_tensors = {} if adapters is None else dict(export_trained(model, hf, adapters))
    scale = 1.0 if adapters is None else adapters.config.scale
    for name, tensor in export_hf_tensors(model, hf):
        yield name, merge_adapters(name, tensor.cpu(), adapter_tensors, scale)


def adapter_shapes(hf: PretrainedConfig, lora: LoraConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of every adapter tensor, in the order of `export_trained`."""
    for rule in stage_adapters(hf, lora, 0, 1):
        yield rule.hf[0], rule.shapes[0]


def sharded_state(
    model: GPTModel, hf: PretrainedConfig, adapters: Adapters | None, metadata: dict[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Return this rank's trained parameters as Megatron's sharded tensors, by parameter name.

    `prefix` is prepended to all names.
    """
    state: dict[str, Any] = {}
    if adapters is None:
        state = model.sharded_state_dict(prefix=prefix, metadata=metadata)
        return state
    parameters = dict(model.named_parameters())
    rank, ranks = _tensor_rank()
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    for weight in stage_adapters(hf, adapters.config, *_pipeline_stage()):
        if weight.rule is ShardRule.WHOLE:
            offsets = []
            replica_id = (0, rank, replica)
        else:
            axis = 0 if weight.rule is ShardRule.ROWS else 1
            offsets = [(axis, rank, ranks)]
            replica_id = (0, 0, replica)
        state[prefix + weight.megatron] = ShardedTensor.from_rank_offsets(
            prefix + weight.hf[0], parameters[weight.megatron], *offsets, replica_id=replica_id
        )
    return state


def _pipeline_stage() -> tuple[int, int]:
    return (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )


def _tensor_rank() -> tuple[int, int]:
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
