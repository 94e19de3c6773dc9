"""How the sequences of a micro-batch are packed: end to end, without padding, and grouped into buckets for attention.

    packed tokens [T]   a a a b b b b c c          three sequences, end to end
    buckets             a a a .    c c . .         rows of one width each, padded at their end
                        b b b b

`PackedSequences` describes both forms. The layers of `trainer.model.layers` compute attention on the buckets.

Everything that a layer asks of the sequences is found here, once for each micro-batch and on the host. A layer that
read a length from the device would wait for all work before it.
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
    def of(cls, gather: Tensor, real: Tensor) -> PaddedCells:
        """`real`: bool [C], which cells hold a token, each token once."""
        cells = real.nonzero()[:, 0]
        return cls(gather=gather, home=cells[torch.argsort(gather[cells])], padding=(~real).nonzero()[:, 0])


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary position embedding (Su et al. 2021): x cos + (-x2, x1) sin, with the halves x1, x2 of a head."""

    cos: Tensor
    """[T, 1, d] of each token's position."""
    sin: Tensor

    @classmethod
    def of(cls, positions_T: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Rotation:
        """`frequencies`: [d / 2], radians from one position to the next."""
        angles = torch.outer(positions_T.to(frequencies.dtype), frequencies.to(positions_T.device))
        cos, sin = (torch.cat((half, half), -1)[:, None].to(dtype) for half in (angles.cos(), angles.sin()))
        return cls(cos, sin)

    def __call__(self, heads: Tensor) -> Tensor:
        """[T, heads, d] -> [T, heads, d]"""
        first, second = heads.chunk(2, -1)
        return heads * self.cos + torch.cat((-second, first), -1) * self.sin


@dataclass
class PackedSequences(PackedSeqParams):
    """Where the sequences of a micro-batch lie, and how their tokens are rotated."""

    ends: list[int] = field(default_factory=list)
    """Where each sequence ends, as numbers of the host: `cu_seqlens_q` without its first."""
    rotation: Rotation | None = None
    """None where Megatron has rotated queries and keys before they come to attention."""
    buckets: list[LengthBucket] = field(default_factory=list)
    cells: PaddedCells | None = None
    """Those of all buckets, end to end."""
    trained: Tensor | None = None
    """int64: the positions whose logits are computed."""

    def rotated(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys as attention compares them."""
        return (query, key) if self.rotation is None else (self.rotation(query), self.rotation(key))


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
    buckets, gathers, reals = [], [], []
    for width in widths_N.unique().tolist():
        members = widths_N == width
        bucket, gather_RW, real_RW = _bucket(starts_N[members], lengths_N[members], width, int(locals_N.sum()), context)
        buckets.append(bucket)
        gathers.append(gather_RW.flatten())
        reals.append(real_RW.flatten())
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        ends=offsets[1:].tolist(),
        buckets=buckets,
        cells=PaddedCells.of(torch.cat(gathers), torch.cat(reals)),
    )


def _bucket(
    starts_R: Tensor, lengths_R: Tensor, width: int, tokens: int, context: ContextRank
) -> tuple[LengthBucket, Tensor, Tensor]:
    """The rectangle of R sequences or parts; which token fills each cell (anything at padded ones); which are real.

    `starts_R`: where they start on this rank; `tokens`: of all of them, on one rank.
    """
    starts_R1, locals_R1 = starts_R[:, None], lengths_R[:, None] // context.ranks
    column = torch.arange(width // context.ranks)
    gather_RW = starts_R1 + torch.minimum(column, locals_R1 - 1)
    keys = _keys(starts_R1, lengths_R[:, None], width, tokens, context) if context.ranks > 1 else None
    return LengthBucket(len(starts_R), len(column), keys), gather_RW, column < locals_R1


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
