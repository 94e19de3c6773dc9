"""The layer spec for platforms without Transformer Engine: plain PyTorch, packed sequences.

Sequences of one micro-batch lie end to end (Megatron's `thd` format, no padding). Attention works
on them in buckets: sequences whose lengths round up to the same multiple of 8 form one rectangle
and one SDPA call. Rows are padded at their end only, and attention is causal, so no real token ever
sees a padded one, and the padded outputs are dropped. With hundreds of short sequences this costs
a few calls a layer instead of hundreds. Ranks that share the sequences see trainer/model/context.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from trainer.model.exchange import gather_context

BUCKET = 8
"""Lengths are rounded up to a multiple of this. Measured on 210 sequences of 25-55 tokens, forward
and backward of one layer: one call a sequence 41 ms, buckets of 8: 34 ms, of 32: 39 ms."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of about one length."""

    rows: int
    width: int
    gather: Tensor
    """int64 [rows * width]: which packed token fills each cell; anything at padded cells."""
    cells: Tensor
    """int64: the cells that hold real tokens."""
    keys: Keys | None = None
    """Where the keys lie, if not where the queries do."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a bucket whose queries are only this rank's part of the sequences."""

    width: int
    gather: Tensor
    """int64 [rows * width]: which token of those of all ranks, end to end, fills each cell."""
    seen: Tensor
    """bool [rows, 1, bucket width, width]: which of them each query sees."""


@dataclass(frozen=True, slots=True)
class Cells:
    """Between T packed tokens and the C cells of all buckets."""

    gather: Tensor
    """int64 [C]: which token fills each cell; anything at padded cells."""
    home: Tensor
    """int64 [T]: the one cell where a token is itself."""
    padding: Tensor
    """int64: the cells that hold no token."""

    @classmethod
    def of(cls, buckets: Sequence[Bucket], tokens: Tensor) -> Cells:
        """`tokens`: which packed token is in each real cell, bucket after bucket."""
        counts = torch.tensor([0] + [bucket.rows * bucket.width for bucket in buckets])
        starts = counts.cumsum(0).tolist()
        real = torch.cat([start + bucket.cells for start, bucket in zip(starts, buckets, strict=False)])
        empty = torch.ones(starts[-1], dtype=torch.bool)
        empty[real] = False
        return cls(
            gather=torch.cat([bucket.gather for bucket in buckets]),
            home=real[torch.argsort(tokens)],
            padding=empty.nonzero()[:, 0],
        )


@dataclass
class PackedSequences(PackedSeqParams):
    """Where the sequences of a micro-batch lie, for rotary embeddings (cu_seqlens) and attention."""

    buckets: list[Bucket] = field(default_factory=list)
    cells: Cells | None = None
    """Those of all buckets, end to end."""
    trained: Tensor | None = None
    """int64: the positions whose logits are computed."""


def pack(lengths: Sequence[int]) -> PackedSequences:
    """Lengths of sequences lying end to end -> their description."""
    lengths_N = torch.tensor(lengths)
    ends_N = lengths_N.cumsum(0)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends_N]).to(torch.int32)
    widths_N = (lengths_N + BUCKET - 1) // BUCKET * BUCKET
    order, buckets = [], []
    for width in widths_N.unique().tolist():
        members = widths_N == width
        bucket, tokens = _bucket(ends_N[members] - lengths_N[members], lengths_N[members], width)
        buckets.append(bucket)
        order.append(tokens)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        buckets=buckets,
        cells=Cells.of(buckets, torch.cat(order)),
    )


def _bucket(starts_R: Tensor, lengths_R: Tensor, width: int) -> tuple[Bucket, Tensor]:
    """The rectangle of R sequences, and the packed tokens in the order of its real cells."""
    column = torch.arange(width)
    real_RW = column < lengths_R[:, None]
    gather_RW = starts_R[:, None] + torch.minimum(column, lengths_R[:, None] - 1)
    bucket = Bucket(len(starts_R), width, gather_RW.flatten(), real_RW.flatten().nonzero()[:, 0])
    return bucket, gather_RW[real_RW]


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
        if self.config.context_parallel_size > 1:
            group = parallel_state.get_context_parallel_group()
            key, value = gather_context(torch.stack([key, value], 1), group).unbind(1)
        cells, buckets = packed_seq_params.cells, packed_seq_params.buckets
        assert cells is not None
        queries = _rectangles(query, cells, buckets)
        if self.config.context_parallel_size > 1:
            places = [bucket.keys for bucket in buckets]
            keys, values = ([_gathered(part, place) for place in places] for part in (key, value))
        else:
            keys, values = (_rectangles(part, cells, buckets) for part in (key, value))
        outputs = [self._attend(*each) for each in zip(queries, keys, values, buckets, strict=True)]
        return _ToTokens.apply(torch.cat(outputs), cells)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, bucket: Bucket) -> Tensor:
        """One rectangle, as its cells: [cells, heads * d]."""
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if bucket.keys is None else bucket.keys.seen,
            is_causal=bucket.keys is None,
            scale=self.scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return out.transpose(1, 2).reshape(bucket.rows * bucket.width, -1)


class _ToCells(torch.autograd.Function):
    """Packed tokens -> cells. Nothing comes back from padded ones (no token sees them), so that the gradient is a
    selection as well: of each token's own cell. That of `index_select` adds cell by cell, on one core."""

    @staticmethod
    def forward(context: Any, packed: Tensor, cells: Cells) -> Tensor:
        context.cells = cells
        return packed.index_select(0, cells.gather)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, context.cells.home), None


class _ToTokens(torch.autograd.Function):
    """Cells -> packed tokens; padded cells are dropped, and get the gradient 0."""

    @staticmethod
    def forward(context: Any, outputs: Tensor, cells: Cells) -> Tensor:
        context.cells = cells
        return outputs.index_select(0, cells.home)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, context.cells.gather).index_fill_(0, context.cells.padding, 0), None


def _rectangles(packed: Tensor, cells: Cells, buckets: Sequence[Bucket]) -> list[Tensor]:
    """[T, heads, d] -> a [rows, heads, width, d] for every bucket."""
    parts = _ToCells.apply(packed, cells).split([bucket.rows * bucket.width for bucket in buckets])
    return [_rectangle(part, bucket.width) for part, bucket in zip(parts, buckets, strict=True)]


def _gathered(packed: Tensor, keys: Keys | None) -> Tensor:
    """Of the tokens of all ranks those that a bucket's queries may see: [rows, heads, width, d]."""
    assert keys is not None
    return _rectangle(packed.index_select(0, keys.gather), keys.width)


def _rectangle(cells: Tensor, width: int) -> Tensor:
    return cells.view(-1, width, *cells.shape[1:]).transpose(1, 2)


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron's local layer with the norms and the attention of this module."""
    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)
