"""How the sequences of a micro-batch are packed: end to end, without padding, and grouped into buckets for attention.

    packed tokens [T]   a a a b b b b c c          three sequences, end to end
    buckets             a a a .    c c . .         rows of one width each, padded at their end
                        b b b b

`PackedSequences` describes both forms. The layers of `trainer.model.layers` compute attention on the buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

BUCKET = 8
"""Lengths are rounded up to a multiple of this. Measured on 210 sequences of 25-55 tokens, forward
and backward of one layer: one call a sequence 41 ms, buckets of 8: 34 ms, of 32: 39 ms."""


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """Sequences of about the same length, as one rectangle of cells."""

    rows: int
    width: int
    gather: Tensor
    """int64 [rows * width]: which packed token fills each cell; anything at padded cells."""
    cells: Tensor
    """int64: the cells that hold real tokens."""
    keys: KeyRanges | None = None
    """Where the keys lie, if not where the queries do."""


@dataclass(frozen=True, slots=True)
class KeyRanges:
    """The keys of a bucket whose queries are only this rank's part of the sequences."""

    width: int
    gather: Tensor
    """int64 [rows * width]: which token of those of all ranks, end to end, fills each cell."""
    seen: Tensor
    """bool [rows, 1, bucket width, width]: which of them each query sees."""


@dataclass(frozen=True, slots=True)
class PaddedCells:
    """The mapping between T packed tokens and the C cells of all buckets."""

    gather: Tensor
    """int64 [C]: which token fills each cell; anything at padded cells."""
    home: Tensor
    """int64 [T]: the one cell where a token is itself."""
    padding: Tensor
    """int64: the cells that hold no token."""

    @classmethod
    def of(cls, buckets: Sequence[LengthBucket], tokens: Tensor) -> PaddedCells:
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

    buckets: list[LengthBucket] = field(default_factory=list)
    cells: PaddedCells | None = None
    """Those of all buckets, end to end."""
    trained: Tensor | None = None
    """int64: the positions whose logits are computed."""


@dataclass(frozen=True, slots=True)
class ContextRank:
    """The position of a rank among those that share the tokens of a micro-batch."""

    rank: int = 0
    ranks: int = 1
    """Number of ranks that share every sequence (context_parallel)."""
    scattered: int = 1
    """Number of ranks that share the activations between the matrices (tensor_parallel, if sequence_parallel)."""


def pack(lengths: Sequence[int], context: ContextRank = ContextRank()) -> PackedSequences:
    """Describe sequences of these lengths, lying end to end; of padded ones, the part of the rank at `context`.

    The offsets are those of the whole sequences, from which Megatron finds the positions of a part by itself.
    """
    lengths_N = torch.tensor(lengths)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_N.cumsum(0)]).to(torch.int32)
    locals_N = lengths_N // context.ranks
    starts_N = locals_N.cumsum(0) - locals_N
    step = BUCKET * context.ranks
    widths_N = (lengths_N + step - 1) // step * step
    order, buckets = [], []
    for width in widths_N.unique().tolist():
        members = widths_N == width
        bucket, tokens = _bucket(starts_N[members], lengths_N[members], width, int(locals_N.sum()), context)
        buckets.append(bucket)
        order.append(tokens)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        buckets=buckets,
        cells=PaddedCells.of(buckets, torch.cat(order)),
    )


def _bucket(
    starts_R: Tensor, lengths_R: Tensor, width: int, tokens: int, context: ContextRank
) -> tuple[LengthBucket, Tensor]:
    """The rectangle of R sequences or parts, and the tokens in the order of its real cells.

    `starts_R`: where they start on this rank; `tokens`: of all of them, on one rank.
    """
    starts_R1, locals_R1 = starts_R[:, None], lengths_R[:, None] // context.ranks
    column = torch.arange(width // context.ranks)
    real_RW = column < locals_R1
    gather_RW = starts_R1 + torch.minimum(column, locals_R1 - 1)
    keys = _keys(starts_R1, lengths_R[:, None], width, tokens, context) if context.ranks > 1 else None
    bucket = LengthBucket(len(starts_R), len(column), gather_RW.flatten(), real_RW.flatten().nonzero()[:, 0], keys)
    return bucket, gather_RW[real_RW]


def _keys(starts_R1: Tensor, lengths_R1: Tensor, width: int, tokens: int, context: ContextRank) -> KeyRanges:
    chunk_R1 = lengths_R1 // (2 * context.ranks)
    position = torch.arange(width)
    key_RK = torch.minimum(position, lengths_R1 - 1)
    number_RK, offset_RK = key_RK // chunk_R1, key_RK % chunk_R1
    back_RK = number_RK >= context.ranks
    owner_RK = torch.where(back_RK, 2 * context.ranks - 1 - number_RK, number_RK)
    gather_RK = owner_RK * tokens + starts_R1 + offset_RK + back_RK * chunk_R1
    column = torch.minimum(torch.arange(width // context.ranks), 2 * chunk_R1 - 1)
    front_R1, back_R1 = context.rank * chunk_R1, (2 * context.ranks - 2 - context.rank) * chunk_R1
    query_RW = column + torch.where(column < chunk_R1, front_R1, back_R1)
    return KeyRanges(width, gather_RK.flatten(), (query_RW[:, None, :, None] >= position))
