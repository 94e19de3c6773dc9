"""The layer spec for packed sequences in plain PyTorch, with replacement of its classes by those of a platform.

The sequences of a micro-batch are concatenated without padding (Megatron's `thd` format). Attention groups them into
buckets: sequences whose lengths round up to the same multiple of 8 form one rectangle, computed by one SDPA call. Rows
are padded only at their end, and attention is causal, so no real token attends to a padded one, and the padded outputs
are dropped. With hundreds of short sequences this takes a few calls per layer instead of hundreds. With context
parallelism every platform has another attention (trainer/platform/fused_layers.py).

A platform may replace classes of the spec (`LayerRole`). Parameters keep their names, because the names come from the
fields of the spec and not from the classes, so one weight map is valid for all platforms.
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
    """Root-mean-square norm. Unlike Megatron's local one it supports sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., hidden]; same shape."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class PackedAttention(MegatronModule):
    """Causal attention within each packed sequence. Has the signature of Megatron's core attention."""

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
        cells = packed_seq_params.cells
        buckets = packed_seq_params.buckets
        assert cells is not None, "with context parallelism the platform must replace this attention"
        queries = _to_rectangles(query, cells, buckets)
        keys = _to_rectangles(key, cells, buckets)
        values = _to_rectangles(value, cells, buckets)
        outputs = [self._attend(*rectangle) for rectangle in zip(queries, keys, values, buckets, strict=True)]
        return _ToTokens.apply(torch.cat(outputs), cells)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, bucket: LengthBucket) -> Tensor:
        """Compute attention of one rectangle; returns [cells, heads * d]."""
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
    """Copies packed tokens to cells.

    Padded cells have no gradient, because no token attends to them. So the gradient of a token is that of its own cell,
    also a selection. The backward pass of `index_select` would instead add cell by cell, on one core.
    """

    @staticmethod
    def forward(context: Any, packed: Tensor, cells: PaddedCells) -> Tensor:
        context.cells = cells
        return packed.index_select(0, cells.token_of_cell)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, context.cells.cell_of_token), None


class _ToTokens(torch.autograd.Function):
    """Copies cells to packed tokens. Padded cells are dropped; their gradient is 0."""

    @staticmethod
    def forward(context: Any, outputs: Tensor, cells: PaddedCells) -> Tensor:
        context.cells = cells
        return outputs.index_select(0, cells.cell_of_token)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        of_cells = gradient.index_select(0, context.cells.token_of_cell)
        return of_cells.index_fill_(0, context.cells.padding_cells, 0), None


def _to_rectangles(packed: Tensor, cells: PaddedCells, buckets: Sequence[LengthBucket]) -> list[Tensor]:
    """Return [rows, heads, width, d] for every bucket, from packed [T, heads, d]."""
    cells_of_buckets = _ToCells.apply(packed, cells).split([bucket.rows * bucket.width for bucket in buckets])
    return [
        bucket_cells.view(-1, bucket.width, *bucket_cells.shape[1:]).transpose(1, 2)
        for bucket_cells, bucket in zip(cells_of_buckets, buckets, strict=True)
    ]


DEFAULT_LAYERS: Mapping[LayerRole, type] = {
    LayerRole.norm: RMSNorm,
    LayerRole.rotation: Rotation,
    LayerRole.attention: PackedAttention,
    LayerRole.column_linear: ColumnParallelLinear,
    LayerRole.row_linear: RowParallelLinear,
    LayerRole.experts: SequentialMLP,
}
"""Classes of the spec without replacements."""


def build_block_spec(
    config: TransformerConfig, replacements: Mapping[LayerRole, type] | None = None
) -> TransformerBlockSubmodules:
    """Build Megatron's local spec with this module's norms and attention, or with a platform's `replacements`."""
    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    spec = TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)
    return replace_modules(
        spec, {DEFAULT_LAYERS[role]: replacement for role, replacement in (replacements or {}).items()}
    )


def replace_modules(node: Any, replacements: Mapping[type, type]) -> Any:
    """Return a copy of `node` (a spec, its submodules, a list of specs) with classes replaced, at any depth."""
    if isinstance(node, type):
        return replacements.get(node, node)
    if isinstance(node, list | tuple):
        return type(node)(replace_modules(child, replacements) for child in node)
    if dataclasses.is_dataclass(node):
        fields = {
            field.name: replace_modules(getattr(node, field.name), replacements)
            for field in dataclasses.fields(node)
            if field.init
        }
        return dataclasses.replace(node, **fields)  # type: ignore[type-var]  # classes have been handled above
    return node
