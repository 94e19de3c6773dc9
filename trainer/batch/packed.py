"""How the sequences of a micro-batch are packed: end to end, without padding, and grouped into buckets for attention.

    packed tokens [T]   a a a b b b b c c          three sequences, end to end
    buckets             a a a .    c c . .         rows of one width each, padded at their end
                        b b b b

`PackedSequences` describes both forms. Our own attention (`trainer.model.layers`) works on the buckets. Fused kernels
take the tokens as they lie, in segments: a sequence each, or two chunks of it where several ranks share sequences.

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


@dataclass(frozen=True, slots=True)
class AttentionSegments:
    """Runs of consecutive queries, each with a run of keys, for kernels of variable length.

    The last query of a run sees all keys of the run, and each query before it one key less (causality aligned at the
    bottom right). No mask is needed, so memory grows with the tokens and not with their square.
    """

    query_offsets: Tensor
    """int32 [segments + 1]: where the queries of each segment start, and the end of the last."""
    key_offsets: Tensor
    """The same of its keys."""
    query_ends: list[int]
    """`query_offsets` without its first, as numbers of the host."""
    key_ends: list[int]
    longest_query: int
    longest_key: int
    keys_K: Tensor | None = None
    """int64: which token of all ranks, in the order of the ranks, is each key; None if keys lie where queries do."""


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
    shared: AttentionSegments | None = None
    """Where several ranks share the sequences: the segments of this rank. `buckets` and `cells` are empty then."""
    rotation: Rotation | None = None
    """None where Megatron has rotated queries and keys before they come to attention."""
    buckets: list[LengthBucket] = field(default_factory=list)
    cells: PaddedCells | None = None
    """Those of all buckets, end to end."""
    trained: Tensor | None = None
    """int64: the positions whose logits are computed."""

    @property
    def segments(self) -> AttentionSegments:
        """The segments of this rank; where no other rank shares the sequences, each sequence is one."""
        if self.shared is not None:
            return self.shared
        return AttentionSegments(
            query_offsets=self.cu_seqlens_q,
            key_offsets=self.cu_seqlens_q,
            query_ends=self.ends,
            key_ends=self.ends,
            longest_query=self.max_seqlen_q,
            longest_key=self.max_seqlen_q,
        )

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
    offsets = _offsets(lengths_N)
    packed = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        ends=offsets[1:].tolist(),
    )
    if context.ranks > 1:
        packed.shared = _shared_segments(lengths_N, context)
        return packed

    starts_N = lengths_N.cumsum(0) - lengths_N
    widths_N = (lengths_N + BUCKET - 1) // BUCKET * BUCKET
    gathers, reals = [], []
    for width in widths_N.unique().tolist():
        members = widths_N == width
        starts_R1, lengths_R1 = starts_N[members][:, None], lengths_N[members][:, None]
        column = torch.arange(width)
        packed.buckets.append(LengthBucket(len(starts_R1), width))
        gathers.append((starts_R1 + torch.minimum(column, lengths_R1 - 1)).flatten())
        reals.append((column < lengths_R1).flatten())
    packed.cells = PaddedCells.of(torch.cat(gathers), torch.cat(reals))
    return packed


def _shared_segments(lengths_N: Tensor, context: ContextRank) -> AttentionSegments:
    """Two segments for each sequence: this rank's chunk from the front, and its counterpart from the back.

    The front chunk sees the keys before its end, and so does the back chunk. The keys of all ranks are gathered in the
    order of the ranks. They are selected into the order of their positions, once for each segment: 2n + 1 chunks
    instead of the 2n that a sequence has, of n ranks.

        2 ranks, rank 0     queries  0 3        keys  0 | 0 1 2 3
                rank 1              1 2              0 1 | 0 1 2
    """
    ranks, chunks_N = context.ranks, lengths_N // (2 * context.ranks)
    tokens = int(lengths_N.sum()) // ranks
    starts_N = (lengths_N.cumsum(0) - lengths_N) // ranks
    front, back = context.rank, 2 * ranks - 1 - context.rank

    keys = []
    for chunk, start in zip(chunks_N.tolist(), starts_N.tolist(), strict=True):
        # Rank r has chunk r at the start of its part of a sequence, and chunk 2n - 1 - r behind it.
        heads = [rank * tokens + start for rank in range(ranks)]
        tails = [rank * tokens + start + chunk for rank in reversed(range(ranks))]
        chunk_starts = torch.tensor([*heads, *tails])[:, None]
        places = (chunk_starts + torch.arange(chunk)).flatten()
        keys += [places[: (front + 1) * chunk], places[: (back + 1) * chunk]]

    query_offsets = _offsets(chunks_N.repeat_interleave(2))
    key_offsets = _offsets(torch.stack([chunks_N * (front + 1), chunks_N * (back + 1)], 1).flatten())
    longest = int(chunks_N.max())
    return AttentionSegments(
        query_offsets=query_offsets,
        key_offsets=key_offsets,
        query_ends=query_offsets[1:].tolist(),
        key_ends=key_offsets[1:].tolist(),
        longest_query=longest,
        longest_key=longest * (back + 1),
        keys_K=torch.cat(keys),
    )


def _offsets(lengths_N: Tensor) -> Tensor:
    """int32 [N + 1]: where each of them starts, and the end of the last.

    >>> _offsets(torch.tensor([3, 5])).tolist()
    [0, 3, 8]
    """
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths_N.cumsum(0)]).to(torch.int32)
