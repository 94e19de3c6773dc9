"""Which Megatron parameter holds which Hugging Face tensors, how it is split, and which ranks have it.

Pure: computed from the Hugging Face configuration alone, so that rank 0 knows the names and shapes of the tensors of
every pipeline stage. Our layer spec keeps every norm and every expert apart; Transformer Engine's fuses them, and
`parameter_of` translates the names.
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

_FUSED = (
    (r"input_layernorm\.weight$", r"self_attention.linear_qkv.layer_norm_weight"),
    (r"pre_mlp_layernorm\.weight$", r"mlp.linear_fc1.layer_norm_weight"),
    (r"experts\.local_experts\.(\d+)\.(linear_fc\d)\.weight$", r"experts.\2.weight\1"),
)

Shape = tuple[int, ...]


def parameter_of(name: str, parameters: Container[str]) -> str:
    """`name` as it is among `parameters`, for every spec that they may be built from. Raises KeyError.

    >>> parameter_of("decoder.layers.3.input_layernorm.weight",
    ...              ["decoder.layers.3.self_attention.linear_qkv.layer_norm_weight"])
    'decoder.layers.3.self_attention.linear_qkv.layer_norm_weight'
    """
    if name in parameters:
        return name
    for pattern, fused in _FUSED:
        other, found = re.subn(pattern, fused, name)
        if found and other in parameters:
            return other
    raise KeyError(name)


_GROUPED = re.compile(r"(.*\.experts)\.local_experts\.(\d+)\.linear_(fc\d)\.weight$")
"""A weight of an expert; where all experts of a rank are one parameter, it is a part of that."""


def find_weight(name: str, parameters: Mapping[str, Tensor]) -> tuple[str, Tensor]:
    """The parameter that holds `name`, and the view of it that is `name`, for every spec. Raises KeyError."""
    expert = _GROUPED.match(name)
    if expert is not None:
        experts, number, matrix = expert.groups()
        grouped = f"{experts}.{matrix}_weights"
        if grouped in parameters:
            return grouped, parameters[grouped][int(number)]
    found = parameter_of(name, parameters)
    return found, parameters[found]


class ShardRule(Enum):
    """How one full parameter lies on the tensor-parallel ranks."""

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
    """One parameter of a pipeline stage: its tensors, and how it is split."""

    megatron: str
    """Its name on the ranks that have it, as the spec of this project names it."""
    rule: ShardRule
    hf: tuple[str, ...]
    shapes: tuple[Shape, ...]
    exported: bool = True
    """False for a second copy of a tensor that another stage exports."""
    holder: int | None = None
    """The expert-parallel rank that has this expert's parameter, whole; None: all have it, cut over the
    tensor-parallel ranks."""


def stage_weights(hf: PretrainedConfig, stage: int, stages: int, expert_ranks: int = 1) -> list[WeightRule]:
    """The parameters of pipeline stage `stage` of `stages`, in export order, over all expert-parallel ranks."""
    shape, first, last = shape_of(hf), stage == 0, stage == stages - 1
    vocabulary = ((shape.vocab, shape.hidden),)
    weights = []
    if first:
        weights.append(
            WeightRule("embedding.word_embeddings.weight", ShardRule.ROWS, ("model.embed_tokens.weight",), vocabulary)
        )
    layers = shape.layers // stages
    for local in range(layers):
        weights += _layer_weights(shape, local, stage * layers + local, expert_ranks)
    if last:
        weights.append(
            WeightRule("decoder.final_layernorm.weight", ShardRule.WHOLE, ("model.norm.weight",), ((shape.hidden,),))
        )
        weights += _head_weights(shape, vocabulary, first)
    return weights


def model_tensors(hf: PretrainedConfig, stages: int) -> Iterator[tuple[str, Shape]]:
    """(name, shape) of every tensor that an export yields, in its order."""
    for stage in range(stages):
        for weight in stage_weights(hf, stage, stages):
            if weight.exported:
                yield from zip(weight.hf, weight.shapes, strict=True)


def _head_weights(shape: ModelShape, vocabulary: tuple[Shape, ...], first: bool) -> list[WeightRule]:
    """The output layer; a tied one is a parameter of its own only where the embedding is another stage's."""
    if not shape.tied:
        return [WeightRule("output_layer.weight", ShardRule.ROWS, ("lm_head.weight",), vocabulary)]
    if first:
        return []
    return [
        WeightRule("output_layer.weight", ShardRule.ROWS, ("model.embed_tokens.weight",), vocabulary, exported=False)
    ]


def _layer_weights(shape: ModelShape, local: int, layer: int, expert_ranks: int) -> list[WeightRule]:
    ours, theirs = f"decoder.layers.{local}.", f"model.layers.{layer}."
    if shape.experts:
        mlp = _expert_weights(shape, ours, theirs, expert_ranks)
    else:
        mlp = _gated(shape, ours + "mlp.", theirs + "mlp.")
    return [
        _norm(shape.hidden, f"{ours}input_layernorm", f"{theirs}input_layernorm"),
        *_attention_weights(shape, ours + "self_attention.", theirs + "self_attn."),
        _norm(shape.hidden, f"{ours}pre_mlp_layernorm", f"{theirs}post_attention_layernorm"),
        *mlp,
    ]


def _norm(size: int, ours: str, theirs: str) -> WeightRule:
    return WeightRule(f"{ours}.weight", ShardRule.WHOLE, (f"{theirs}.weight",), ((size,),))


def _attention_weights(shape: ModelShape, ours: str, theirs: str) -> Iterator[WeightRule]:
    hidden, sizes = shape.hidden, (shape.query, shape.key, shape.key)

    def qkv(part: str, shapes: tuple[Shape, ...]) -> WeightRule:
        return WeightRule(
            f"{ours}linear_qkv.{part}", ShardRule.QKV, tuple(f"{theirs}{x}_proj.{part}" for x in "qkv"), shapes
        )

    yield qkv("weight", tuple((size, hidden) for size in sizes))
    if shape.qkv_bias:
        yield qkv("bias", tuple((size,) for size in sizes))
    if shape.qk_norm:
        for name in "qk":
            yield _norm(shape.head_dim, f"{ours}{name}_layernorm", f"{theirs}{name}_norm")
    yield WeightRule(
        f"{ours}linear_proj.weight", ShardRule.COLUMNS, (f"{theirs}o_proj.weight",), ((hidden, shape.query),)
    )


def _expert_weights(shape: ModelShape, ours: str, theirs: str, ranks: int) -> Iterator[WeightRule]:
    """The router, and the experts in order: each rank has as many, numbered from 0 on it."""
    router = ((shape.experts, shape.hidden),)
    yield WeightRule(f"{ours}mlp.router.weight", ShardRule.WHOLE, (f"{theirs}mlp.gate.weight",), router)
    for expert in range(shape.experts):
        holder, local = divmod(expert, shape.experts // ranks)
        names = f"{ours}mlp.experts.local_experts.{local}.", f"{theirs}mlp.experts.{expert}."
        yield from _gated(shape, *names, holder)


def _gated(shape: ModelShape, ours: str, theirs: str, holder: int | None = None) -> Iterator[WeightRule]:
    """The two parameters of a gated MLP: down(silu(gate(x)) * up(x))."""
    hidden, inner = shape.hidden, shape.ffn
    gate_up = (f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight")
    shapes = ((inner, hidden), (inner, hidden))
    yield WeightRule(f"{ours}linear_fc1.weight", ShardRule.GATE_UP, gate_up, shapes, holder=holder)
    down = (f"{theirs}down_proj.weight",)
    yield WeightRule(f"{ours}linear_fc2.weight", ShardRule.COLUMNS, down, ((hidden, inner),), holder=holder)
