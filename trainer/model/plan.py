"""Which Megatron parameter holds which Hugging Face tensors, and how it is cut over tensor-parallel ranks.

Pure: from the Hugging Face configuration alone, so that rank 0 knows the names and shapes of the
tensors of every pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from transformers import PretrainedConfig

from trainer.model.build import head_dim

Shape = tuple[int, ...]


class Cut(Enum):
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
class Weight:
    """One parameter of a stage."""

    megatron: str
    cut: Cut
    hf: tuple[str, ...]
    shapes: tuple[Shape, ...]
    exported: bool = True
    """False for a second copy of a tensor that another stage exports."""


def stage_weights(hf: PretrainedConfig, stage: int, stages: int) -> list[Weight]:
    """The parameters of pipeline stage `stage` of `stages`, in export order."""
    first, last = stage == 0, stage == stages - 1
    vocabulary = ((hf.vocab_size, hf.hidden_size),)
    weights = []
    if first:
        weights.append(Weight("embedding.word_embeddings.weight", Cut.ROWS, ("model.embed_tokens.weight",), vocabulary))
    layers = hf.num_hidden_layers // stages
    for local in range(layers):
        weights += _layer_weights(hf, local, stage * layers + local)
    if last:
        weights.append(
            Weight("decoder.final_layernorm.weight", Cut.WHOLE, ("model.norm.weight",), ((hf.hidden_size,),))
        )
        weights += _head_weights(hf, vocabulary, first)
    return weights


def model_tensors(hf: PretrainedConfig, stages: int) -> Iterator[tuple[str, Shape]]:
    """(name, shape) of every tensor that an export yields, in its order."""
    for stage in range(stages):
        for weight in stage_weights(hf, stage, stages):
            if weight.exported:
                yield from zip(weight.hf, weight.shapes, strict=True)


def _head_weights(hf: PretrainedConfig, vocabulary: tuple[Shape, ...], first: bool) -> list[Weight]:
    """The output layer; a tied one is a parameter of its own only where the embedding is another stage's."""
    if not hf.tie_word_embeddings:
        return [Weight("output_layer.weight", Cut.ROWS, ("lm_head.weight",), vocabulary)]
    if first:
        return []
    return [Weight("output_layer.weight", Cut.ROWS, ("model.embed_tokens.weight",), vocabulary, exported=False)]


def _layer_weights(hf: PretrainedConfig, local: int, layer: int) -> list[Weight]:
    hidden, ffn = hf.hidden_size, hf.intermediate_size
    query, group = hf.num_attention_heads * head_dim(hf), hf.num_key_value_heads * head_dim(hf)
    ours, theirs = f"decoder.layers.{local}.", f"model.layers.{layer}."
    qkv = [theirs + f"self_attn.{name}_proj." for name in "qkv"]
    sizes = (query, group, group)

    def norm(name: str, source: str) -> Weight:
        return Weight(f"{ours}{name}.weight", Cut.WHOLE, (f"{theirs}{source}.weight",), ((hidden,),))

    return [
        norm("input_layernorm", "input_layernorm"),
        Weight(
            ours + "self_attention.linear_qkv.weight",
            Cut.QKV,
            tuple(name + "weight" for name in qkv),
            tuple((size, hidden) for size in sizes),
        ),
        Weight(
            ours + "self_attention.linear_qkv.bias",
            Cut.QKV,
            tuple(name + "bias" for name in qkv),
            tuple((size,) for size in sizes),
        ),
        Weight(
            ours + "self_attention.linear_proj.weight",
            Cut.COLUMNS,
            (theirs + "self_attn.o_proj.weight",),
            ((hidden, query),),
        ),
        norm("pre_mlp_layernorm", "post_attention_layernorm"),
        Weight(
            ours + "mlp.linear_fc1.weight",
            Cut.GATE_UP,
            (theirs + "mlp.gate_proj.weight", theirs + "mlp.up_proj.weight"),
            ((ffn, hidden), (ffn, hidden)),
        ),
        Weight(ours + "mlp.linear_fc2.weight", Cut.COLUMNS, (theirs + "mlp.down_proj.weight",), ((hidden, ffn),)),
    ]
