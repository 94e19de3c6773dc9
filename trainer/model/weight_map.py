"""Maps Megatron parameters to Hugging Face tensors, and describes how each parameter is split over ranks.

Pure: computed from the Hugging Face configuration alone, so rank 0 can name the tensors of every pipeline stage. Our
layer spec has a separate parameter for every norm and every expert. Transformer Engine's spec fuses them, and
`find_parameter_name` translates the names.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from transformers import PretrainedConfig

from async_grpo.models.shapes import ModelShape, shape_of

if TYPE_CHECKING:
    from torch import Tensor

_FUSED_NAMES = (
    (r"input_layernorm\.weight$", r"self_attention.linear_qkv.layer_norm_weight"),
    (r"pre_mlp_layernorm\.weight$", r"mlp.linear_fc1.layer_norm_weight"),
    (r"experts\.local_experts\.(\d+)\.(linear_fc\d)\.weight$", r"experts.\2.weight\1"),
)

"""(our name as a pattern, name in Transformer Engine's spec)."""

Shape = tuple[int, ...]


def find_parameter_name(name: str, parameters: Container[str]) -> str:
    """Return the name in `parameters` of the parameter that our spec calls `name`. Raises KeyError.

    >>> find_parameter_name("decoder.layers.3.input_layernorm.weight",
    ...              ["decoder.layers.3.self_attention.linear_qkv.layer_norm_weight"])
    'decoder.layers.3.self_attention.linear_qkv.layer_norm_weight'
    """
    if name in parameters:
        return name
    for pattern, replacement in _FUSED_NAMES:
        fused_name, replacements = re.subn(pattern, replacement, name)
        if replacements and fused_name in parameters:
            return fused_name
    raise KeyError(name)


_EXPERT_WEIGHT = re.compile(r"(.*\.experts)\.local_experts\.(\d+)\.linear_(fc\d)\.weight$")


def find_weight(name: str, parameters: Mapping[str, Tensor]) -> tuple[str, Tensor]:
    """Return (name of the parameter that contains weight `name`, view of the weight), for every spec.

    Raises KeyError.
    """
    expert_weight = _EXPERT_WEIGHT.match(name)
    if expert_weight is not None:
        # `GroupedExperts` has one parameter for all experts of a rank.
        experts, index, matrix = expert_weight.groups()
        grouped_name = f"{experts}.{matrix}_weights"
        if grouped_name in parameters:
            return grouped_name, parameters[grouped_name][int(index)]
    parameter_name = find_parameter_name(name, parameters)
    return parameter_name, parameters[parameter_name]


class ShardRule(Enum):
    """How tensor-parallel ranks split a parameter."""

    WHOLE = auto()
    """Every rank has all of it."""
    ROWS = auto()
    """Dimension 0 is split."""
    COLUMNS = auto()
    """Dimension 1 is split."""
    QKV = auto()
    """Query, key, value interleaved by group: [groups, heads per group + 2, head_dim]; groups are split."""
    GATE_UP = auto()
    """Gate and up are split first, then concatenated."""


@dataclass(frozen=True, slots=True)
class WeightRule:
    """One parameter of a pipeline stage: its Hugging Face tensors, and how it is split."""

    megatron: str
    """Name of the parameter in our layer spec, on the ranks that have it."""
    rule: ShardRule
    hf: tuple[str, ...]
    """Names of its Hugging Face tensors."""
    shapes: tuple[Shape, ...]
    """Full shapes of these tensors."""
    exported: bool = True
    """False for a second copy of a tensor that another stage exports."""
    expert_rank: int | None = None
    """Expert-parallel rank that has this parameter of an expert, unsplit. None: outside the experts."""


def stage_weights(hf: PretrainedConfig, stage: int, stages: int, expert_ranks: int = 1) -> list[WeightRule]:
    """Return the parameters of pipeline stage `stage` of `stages`, in export order, of all expert-parallel ranks."""
    shape = shape_of(hf)
    is_first = stage == 0
    is_last = stage == stages - 1
    vocabulary = ((shape.vocab, shape.hidden),)
    weights = []
    if is_first:
        weights.append(
            WeightRule("embedding.word_embeddings.weight", ShardRule.ROWS, ("model.embed_tokens.weight",), vocabulary)
        )
    layers = shape.layers // stages
    for local_layer in range(layers):
        weights += _layer_weights(shape, local_layer, stage * layers + local_layer, expert_ranks)
    if is_last:
        weights.append(
            WeightRule("decoder.final_layernorm.weight", ShardRule.WHOLE, ("model.norm.weight",), ((shape.hidden,),))
        )
        weights += _output_layer_weights(shape, vocabulary, is_first=is_first)
    return weights


def model_tensors(hf: PretrainedConfig, stages: int) -> Iterator[tuple[str, Shape]]:
    """Yield (name, shape) of every exported tensor, in export order."""
    for stage in range(stages):
        for weight in stage_weights(hf, stage, stages):
            if weight.exported:
                yield from zip(weight.hf, weight.shapes, strict=True)


def _output_layer_weights(shape: ModelShape, vocabulary: tuple[Shape, ...], *, is_first: bool) -> list[WeightRule]:
    if not shape.tied:
        return [WeightRule("output_layer.weight", ShardRule.ROWS, ("lm_head.weight",), vocabulary)]
    # A tied output layer is a separate parameter only if the embedding is on another stage.
    if is_first:
        return []
    return [
        WeightRule("output_layer.weight", ShardRule.ROWS, ("model.embed_tokens.weight",), vocabulary, exported=False)
    ]


# In the following functions, `megatron` and `hf` are the prefixes of the names on both sides.


def _layer_weights(shape: ModelShape, local_layer: int, layer: int, expert_ranks: int) -> list[WeightRule]:
    megatron = f"decoder.layers.{local_layer}."
    hf = f"model.layers.{layer}."
    if shape.experts:
        mlp = _expert_weights(shape, megatron, hf, expert_ranks)
    else:
        mlp = _gated_mlp_weights(shape, megatron + "mlp.", hf + "mlp.")
    return [
        _norm_weight(shape.hidden, f"{megatron}input_layernorm", f"{hf}input_layernorm"),
        *_attention_weights(shape, megatron + "self_attention.", hf + "self_attn."),
        _norm_weight(shape.hidden, f"{megatron}pre_mlp_layernorm", f"{hf}post_attention_layernorm"),
        *mlp,
    ]


def _norm_weight(size: int, megatron: str, hf: str) -> WeightRule:
    return WeightRule(f"{megatron}.weight", ShardRule.WHOLE, (f"{hf}.weight",), ((size,),))


def _attention_weights(shape: ModelShape, megatron: str, hf: str) -> Iterator[WeightRule]:
    hidden = shape.hidden
    sizes = (shape.query, shape.key, shape.key)

    def qkv(kind: str, shapes: tuple[Shape, ...]) -> WeightRule:
        names = tuple(f"{hf}{projection}_proj.{kind}" for projection in "qkv")
        return WeightRule(f"{megatron}linear_qkv.{kind}", ShardRule.QKV, names, shapes)

    yield qkv("weight", tuple((size, hidden) for size in sizes))
    if shape.qkv_bias:
        yield qkv("bias", tuple((size,) for size in sizes))
    if shape.qk_norm:
        for name in "qk":
            yield _norm_weight(shape.head_dim, f"{megatron}{name}_layernorm", f"{hf}{name}_norm")
    yield WeightRule(
        f"{megatron}linear_proj.weight", ShardRule.COLUMNS, (f"{hf}o_proj.weight",), ((hidden, shape.query),)
    )


def _expert_weights(shape: ModelShape, megatron: str, hf: str, expert_ranks: int) -> Iterator[WeightRule]:
    """Yield the router and the experts in order. Experts are divided evenly over ranks and numbered from 0 on each."""
    router = ((shape.experts, shape.hidden),)
    yield WeightRule(f"{megatron}mlp.router.weight", ShardRule.WHOLE, (f"{hf}mlp.gate.weight",), router)
    for expert in range(shape.experts):
        expert_rank, local_expert = divmod(expert, shape.experts // expert_ranks)
        prefixes = f"{megatron}mlp.experts.local_experts.{local_expert}.", f"{hf}mlp.experts.{expert}."
        yield from _gated_mlp_weights(shape, *prefixes, expert_rank)


def _gated_mlp_weights(
    shape: ModelShape, megatron: str, hf: str, expert_rank: int | None = None
) -> Iterator[WeightRule]:
    """Yield the two parameters of a gated MLP: down(silu(gate(x)) * up(x))."""
    hidden = shape.hidden
    inner = shape.ffn
    gate_up = (f"{hf}gate_proj.weight", f"{hf}up_proj.weight")
    shapes = ((inner, hidden), (inner, hidden))
    yield WeightRule(f"{megatron}linear_fc1.weight", ShardRule.GATE_UP, gate_up, shapes, expert_rank=expert_rank)
    down = (f"{hf}down_proj.weight",)
    yield WeightRule(
        f"{megatron}linear_fc2.weight", ShardRule.COLUMNS, down, ((hidden, inner),), expert_rank=expert_rank
    )
