"""Low-rank adapters on Megatron's linear layers, equal to those that PEFT puts on the Hugging Face model.

    y = W x + scale * B A x        W [out, in] frozen, A [r, in] kaiming-uniform, B [out, r] zero at first

Megatron fuses query, key and value (and gate and up) into one layer; here every Hugging Face projection keeps its own A
and B, and their outputs are put together in the order of the fused one. An adapter hangs on its layer by a forward
hook, so the layer can be of any platform, and its parameters keep their names. On tensor-parallel ranks:

    column-parallel layer (q, k, v, gate, up)   A whole, B cut by rows      A x is exchanged where the input would be
    row-parallel layer (o, down)                A cut by columns, B whole   A x is summed where the output would be

What is exchanged is r numbers a token. With sequence parallelism the whole part sees the tokens of its rank alone, and
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
from trainer.model.hf_weights import export_hf, gathered
from trainer.model.shards import RankShard
from trainer.model.weight_map import ShardRule, WeightRule, stage_weights

CHILD = "adapter"
"""Name of an adapter in its layer."""

_ROW_PARALLEL = ShardRule.COLUMNS
"""The rule of a weight whose layer gets a part of the inputs and sums the outputs."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """What is trained, and on which weights."""

    config: LoraConfig
    base: bytes
    """`base_digest` of the folder of the frozen weights."""

    @classmethod
    def of(cls, config: LoraConfig | None, folder: Path) -> Adapters | None:
        """Those of a configuration on the weights of `folder`; None without one. All ranks call it."""
        return None if config is None else cls(config, _shared_digest(folder))

    def traits(self) -> dict[str, str | int | bool | None]:
        """The values in which other adapters would differ."""
        config = self.config
        return {
            "lora_rank": config.rank,
            "lora_alpha": str(config.peft_alpha),
            "lora_rslora": config.rslora,
            "lora_targets": " ".join(config.targets),
            "lora_base": self.base.hex(),
        }


def _shared_digest(folder: Path) -> bytes:
    """`base_digest`, for which only rank 0 reads all of the weights."""
    digest = torch.zeros(DIGEST_BYTES, dtype=torch.uint8)
    if dist.get_rank() == 0:
        digest = torch.frombuffer(bytearray(base_digest(folder)), dtype=torch.uint8)
    dist.broadcast(digest, 0)
    return digest.numpy().tobytes()


def stage_adapters(hf: PretrainedConfig, lora: LoraConfig, stage: int, stages: int) -> Iterator[WeightRule]:
    """A and B of every target of a pipeline stage, in export order."""
    for weight in stage_weights(hf, stage, stages):
        for name, (rows, columns) in _targets(weight, lora):
            part = name.removesuffix(".weight").rpartition(".")[2]
            layer = f"{weight.megatron.removesuffix('.weight')}.{CHILD}"
            by_row = weight.rule is _ROW_PARALLEL
            rule_a, rule_b = (ShardRule.COLUMNS, ShardRule.WHOLE) if by_row else (ShardRule.WHOLE, ShardRule.ROWS)
            name_a, name_b = adapter_names(name)
            yield WeightRule(f"{layer}.lora_A.{part}", rule_a, (name_a,), ((lora.rank, columns),))
            yield WeightRule(f"{layer}.lora_B.{part}", rule_b, (name_b,), ((rows, lora.rank),))


def _targets(weight: WeightRule, lora: LoraConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    """(Hugging Face name, shape) of the matrices of a parameter that get adapters."""
    for name, shape in zip(weight.hf, weight.shapes, strict=True):
        if weight.holder is None and name.endswith(tuple(f".{target}.weight" for target in lora.targets)):
            rows, columns = shape
            yield name, (rows, columns)


class LoraAdapter(torch.nn.Module):
    """The adapters of one linear layer of Megatron, which holds one or several projections."""

    def __init__(self, layer: Any, weight: WeightRule, lora: LoraConfig, hf: PretrainedConfig) -> None:
        super().__init__()
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        self._sequence_parallel = bool(layer.config.sequence_parallel)
        self._by_row = weight.rule is _ROW_PARALLEL
        self._scale, self._rank = lora.scale, lora.rank
        self._blocks = hf.num_key_value_heads // ranks if weight.rule is ShardRule.QKV else 1
        """The fused output repeats query, key, value so many times, once for each group of heads."""
        self._widths: dict[str, int] = {}
        """Outputs on this rank of every projection of the layer, by its name."""
        targets = dict(_targets(weight, lora))
        self.lora_A, self.lora_B = torch.nn.ParameterDict(), torch.nn.ParameterDict()
        for name, (rows, columns) in zip(weight.hf, weight.shapes, strict=True):
            part = name.removesuffix(".weight").rpartition(".")[2]
            self._widths[part] = rows if self._by_row else rows // ranks
            if name in targets:
                inputs = columns // ranks if self._by_row else columns
                self.lora_A[part] = self._parameter((lora.rank, inputs), layer, cut=1 if self._by_row else None)
                self.lora_B[part] = self._parameter(
                    (self._widths[part], lora.rank), layer, cut=None if self._by_row else 0
                )

    def _parameter(self, shape: tuple[int, int], layer: Any, cut: int | None) -> torch.nn.Parameter:
        """`cut`: the dimension that is cut over the tensor-parallel ranks; None: all have the whole."""
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=layer.weight.dtype, device=layer.weight.device))
        set_tensor_model_parallel_attributes(parameter, cut is not None, -1 if cut is None else cut, 1)
        parameter.sequence_parallel = self._sequence_parallel and cut is None
        return parameter

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs of the layer [T, 1, in] -> what is added to its output [T, 1, out], both as the layer has them."""
        down = F.linear(inputs, torch.cat(list(self.lora_A.values())))
        pieces = dict(zip(self.lora_A, self._exchanged(down).split(self._rank, -1), strict=True))
        outputs = []
        for part, width in self._widths.items():
            if part in pieces:
                outputs.append(F.linear(pieces[part], self.lora_B[part]) * self._scale)
            else:
                some = next(iter(pieces.values()))
                outputs.append(some.new_zeros(*some.shape[:-1], width))
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat([part.unflatten(-1, (self._blocks, -1)) for part in outputs], -1).flatten(-2)

    def _exchanged(self, down: Tensor) -> Tensor:
        """A x of all tokens, as B needs it, from what this rank has of it."""
        found: Tensor
        if self._by_row and self._sequence_parallel:
            found = mappings.reduce_scatter_to_sequence_parallel_region(down)
        elif self._by_row:
            found = mappings.reduce_from_tensor_model_parallel_region(down)
        elif self._sequence_parallel:
            found = mappings.gather_from_sequence_parallel_region(down)
        else:
            found = mappings.copy_to_tensor_model_parallel_region(down)
        return found


def attach_adapters(model: GPTModel, hf: PretrainedConfig, lora: LoraConfig, seed: int) -> None:
    """Freeze the model and put adapters on the targets, so that it computes what it computed before."""
    model.requires_grad_(False)
    modules = dict(model.named_modules())
    for weight in stage_weights(hf, *_stage()):
        if any(_targets(weight, lora)):
            layer = modules[weight.megatron.removesuffix(".weight")]
            layer.add_module(CHILD, LoraAdapter(layer, weight, lora, hf))
            layer.register_forward_hook(_add_adapter)
    _initialise(model, hf, lora, seed)
    if model.config.recompute_granularity == "full" and hasattr(model, "embedding"):
        # What is recomputed has no gradient unless something that enters it has one, and the embedding is frozen.
        model.embedding.register_forward_hook(lambda _module, _inputs, output: _with_gradient(output))


def _add_adapter(layer: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> Any:
    return output[0] + layer.adapter(inputs[0]), *output[1:]


def _with_gradient(output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


@torch.no_grad()
def _initialise(model: GPTModel, hf: PretrainedConfig, lora: LoraConfig, seed: int) -> None:
    """Draw every A as PEFT does, uniform within 1 / sqrt(inputs). A depends on its name and the seed alone, so it is
    the same whatever the layout of the ranks."""
    parameters, shape = dict(model.named_parameters()), shape_of(hf)
    for weight in stage_adapters(hf, lora, *_stage()):
        if ".lora_A." not in weight.megatron:
            continue
        generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed} {weight.hf[0]}".encode()) >> 1)
        full = torch.empty(weight.shapes[0]).uniform_(-1, 1, generator=generator) / math.sqrt(weight.shapes[0][1])
        (part,) = RankShard(weight, *_tensor_rank()).tensor_views({weight.hf[0]: full}, shape)
        parameters[weight.megatron].copy_(part)


def export_trained(model: GPTModel, hf: PretrainedConfig, adapters: Adapters | None) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor on the CPU) of what is trained, on global rank 0; nothing on the others, which take part.
    Adapters have PEFT's names."""
    if adapters is None:
        yield from export_whole(model, hf, None)
        return
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    rules = [(stage, rule) for stage in range(stages) for rule in stage_adapters(hf, adapters.config, stage, stages)]
    for name, tensor in gathered(model, hf, rules):
        yield name, tensor.cpu()


def export_whole(model: GPTModel, hf: PretrainedConfig, adapters: Adapters | None) -> Iterator[tuple[str, Tensor]]:
    """As `export_trained`, of the whole model, with adapters added as engines add them."""
    found = {} if adapters is None else dict(export_trained(model, hf, adapters))
    scale = 1.0 if adapters is None else adapters.config.scale
    for name, tensor in export_hf(model, hf):
        yield name, merge_adapters(name, tensor.cpu(), found, scale)


def adapter_shapes(hf: PretrainedConfig, lora: LoraConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor of `export_adapters`."""
    for rule in stage_adapters(hf, lora, 0, 1):
        yield rule.hf[0], rule.shapes[0]


def sharded_state(
    model: GPTModel, hf: PretrainedConfig, adapters: Adapters | None, metadata: dict[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """What is trained as Megatron's sharded tensors of this rank, by parameter name; `prefix` is put before all
    names."""
    state: dict[str, Any] = {}
    if adapters is None:
        state = model.sharded_state_dict(prefix=prefix, metadata=metadata)
        return state
    parameters, (rank, ranks) = dict(model.named_parameters()), _tensor_rank()
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    for weight in stage_adapters(hf, adapters.config, *_stage()):
        whole = weight.rule is ShardRule.WHOLE
        axis = 0 if weight.rule is ShardRule.ROWS else 1
        state[prefix + weight.megatron] = ShardedTensor.from_rank_offsets(
            prefix + weight.hf[0],
            parameters[weight.megatron],
            *(() if whole else ((axis, rank, ranks),)),
            replica_id=(0, rank if whole else 0, replica),
        )
    return state


def _stage() -> tuple[int, int]:
    return (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )


def _tensor_rank() -> tuple[int, int]:
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
