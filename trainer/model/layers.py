"""The layer spec for packed sequences in plain PyTorch, and the replacement of its classes by those of a platform.

The sequences of a micro-batch lie end to end (Megatron's `thd` format, no padding). Attention works on them in
buckets: sequences whose lengths round up to the same multiple of 8 form one rectangle and one SDPA call. Rows are
padded at their end only, and attention is causal, so no real token ever sees a padded one, and the padded outputs are
dropped. With hundreds of short sequences this costs a few calls a layer instead of hundreds. Where several ranks share
sequences, every platform has another attention (trainer/platform/fused_layers.py).

A platform may replace classes of the spec (`LayerRole`). Parameters keep their names, because the names come from the
places in the spec and not from the classes: which parameter holds which tensor is the same on every platform.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from trainer.batch.layout import LengthBucket, PackedSequences, PaddedCells, Rotation
from trainer.platform.base import LayerRole


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm; unlike Megatron's local one it may be sequence-parallel."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]"""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class PackedAttention(MegatronModule):
    """Causal attention within each packed sequence. Signature: Megatron's core attention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """query [T, heads, d], key and value [T, groups, d] -> [T, heads * d]"""
        assert packed_seq_params is not None, "the trainer packs every micro-batch"
        query, key = packed_seq_params.rotate(query, key)
        cells, buckets = packed_seq_params.cells, packed_seq_params.buckets
        assert cells is not None, "attention over sequences that ranks share is the platform's"
        queries, keys, values = (_rectangles(part, cells, buckets) for part in (query, key, value))
        outputs = [self._attend(*each) for each in zip(queries, keys, values, buckets, strict=True)]
        return _ToTokens.apply(torch.cat(outputs), cells)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, bucket: LengthBucket) -> Tensor:
        """One rectangle, as its cells: [cells, heads * d]."""
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=self.scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return out.transpose(1, 2).reshape(bucket.rows * bucket.width, -1)


class _ToCells(torch.autograd.Function):
    """Packed tokens -> cells. Nothing comes back from padded ones (no token sees them), so that the gradient is a
    selection as well: of each token's own cell. That of `index_select` adds cell by cell, on one core."""

    @staticmethod
    def forward(context: Any, packed: Tensor, cells: PaddedCells) -> Tensor:
        context.cells = cells
        return packed.index_select(0, cells.token_of_cell)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, context.cells.cell_of_token), None


class _ToTokens(torch.autograd.Function):
    """Cells -> packed tokens; padded cells are dropped, and get the gradient 0."""

    @staticmethod
    def forward(context: Any, outputs: Tensor, cells: PaddedCells) -> Tensor:
        context.cells = cells
        return outputs.index_select(0, cells.cell_of_token)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, context.cells.token_of_cell).index_fill_(
            0, context.cells.padding_cells, 0
        ), None


def _rectangles(packed: Tensor, cells: PaddedCells, buckets: Sequence[LengthBucket]) -> list[Tensor]:
    """[T, heads, d] -> a [rows, heads, width, d] for every bucket."""
    parts = _ToCells.apply(packed, cells).split([bucket.rows * bucket.width for bucket in buckets])
    return [_rectangle(part, bucket.width) for part, bucket in zip(parts, buckets, strict=True)]


def _rectangle(cells: Tensor, width: int) -> Tensor:
    return cells.view(-1, width, *cells.shape[1:]).transpose(1, 2)


OWN_LAYERS: Mapping[LayerRole, type] = {
    LayerRole.norm: RMSNorm,
    LayerRole.rotation: Rotation,
    LayerRole.attention: PackedAttention,
    LayerRole.column_linear: ColumnParallelLinear,
    LayerRole.row_linear: RowParallelLinear,
    LayerRole.experts: SequentialMLP,
}
"""The classes that stand where a platform has none of its own."""


def block_spec(
    config: TransformerConfig, replacements: Mapping[LayerRole, type] | None = None
) -> TransformerBlockSubmodules:
    """Megatron's local layer with the norms and the attention of this module, or with a platform's `replacements`."""
    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    spec = TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)
    return replace_modules(spec, {OWN_LAYERS[role]: layer for role, layer in (replacements or {}).items()})


def replace_modules(node: Any, by: Mapping[type, type]) -> Any:
    """A copy of `node` (a spec, its submodules, a list of specs) with the classes of `by` swapped, at any depth."""
    if isinstance(node, type):
        return by.get(node, node)
    if isinstance(node, list | tuple):
        return type(node)(replace_modules(child, by) for child in node)
    if dataclasses.is_dataclass(node):
        return dataclasses.replace(  # type: ignore[type-var]  # classes have been dealt with
            node,
            **{
                field.name: replace_modules(getattr(node, field.name), by)
                for field in dataclasses.fields(node)
                if field.init
            },
        )
    return node
