"""Layout of the sequences of a micro-batch: end to end without padding, and in padded buckets for attention.

    packed tokens [T]   a a a b b b b c c          three sequences, end to end
    buckets             a a a .    c c . .         rectangles of rows of similar length
                        b b b b

`PackedSequences` describes both forms. Our own attention (`trainer.model.layers`) works on the buckets. Fused kernels
work on the packed tokens, in segments: one per sequence, or two per sequence under context parallelism.

All of this is computed here, on the host and once per micro-batch. A layer that read a length from the device instead
would wait for all device work queued before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

BUCKET = 8
"""Lengths are rounded up to a multiple of this. Measured on 210 sequences of 25-55 tokens, forward and backward of one
layer: one call per sequence 41 ms, buckets of 8: 34 ms, of 32: 39 ms."""


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """Rectangle of cells that holds sequences of similar length, one per row."""

    rows: int
    width: int


@dataclass(frozen=True, slots=True)
class AttentionSegments:
    """Runs of consecutive queries, each with a run of keys, for variable-length attention kernels.

    The last query of a segment attends to all its keys, and each query before it to one key less (causal mask, aligned
    at the bottom right). No mask tensor is needed, so memory is linear in the number of tokens.
    """

    query_offsets: Tensor
    """int32 [segments + 1]: start of the queries of each segment, and the end of the last."""
    key_offsets: Tensor
    """int32 [segments + 1]: start of the keys of each segment, and the end of the last."""
    query_ends: list[int]
    """`query_offsets` without the first, on the host."""
    key_ends: list[int]
    longest_query: int
    longest_key: int
    keys_K: Tensor | None = None
    """int64: index of each key among the tokens of all ranks, concatenated by rank; None if the keys are the tokens of
    this rank, in their order."""


@dataclass(frozen=True, slots=True)
class PaddedCells:
    """Mapping between T packed tokens and the C cells of all buckets."""

    token_of_cell: Tensor
    """int64 [C]: index of the token in each cell; any token of the row for padding."""
    cell_of_token: Tensor
    """int64 [T]: index of the cell that holds each token."""
    padding_cells: Tensor
    """int64: cells that hold no token."""

    @classmethod
    def of(cls, token_of_cell: Tensor, is_token: Tensor) -> PaddedCells:
        """Build the mapping. `is_token`: bool [C], True for cells that hold a token, once for each token."""
        cells = is_token.nonzero()[:, 0]
        return cls(
            token_of_cell=token_of_cell,
            cell_of_token=cells[torch.argsort(token_of_cell[cells])],
            padding_cells=(~is_token).nonzero()[:, 0],
        )


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary position embedding (Su et al. 2021): x cos + (-x2, x1) sin, where x1 and x2 are the halves of a head."""

    cos: Tensor
    """[T, 1, d]: cosines of the angles at each token's position."""
    sin: Tensor

    @classmethod
    def of(cls, positions_T: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Rotation:
        """Compute the rotation. `frequencies`: [d / 2], radians per position."""
        angles = torch.outer(positions_T.to(frequencies.dtype), frequencies.to(positions_T.device))
        cos = torch.cat((angles.cos(), angles.cos()), -1)[:, None].to(dtype)
        sin = torch.cat((angles.sin(), angles.sin()), -1)[:, None].to(dtype)
        return cls(cos, sin)

    def __call__(self, heads: Tensor) -> Tensor:
        """Rotate [T, heads, d]."""
        first, second = heads.chunk(2, -1)
        return heads * self.cos + torch.cat((-second, first), -1) * self.sin


@dataclass
class PackedSequences(PackedSeqParams):
    """Layout of the sequences of a micro-batch, passed by Megatron to every layer."""

    ends: list[int] = field(default_factory=list)
    """End of each sequence: `cu_seqlens_q` without the first, on the host."""
    context_segments: AttentionSegments | None = None
    """This rank's segments under context parallelism; `buckets` and `cells` are empty then."""
    rotation: Rotation | None = None
    """None if Megatron rotates queries and keys before attention."""
    buckets: list[LengthBucket] = field(default_factory=list)
    cells: PaddedCells | None = None
    """Cells of all buckets, concatenated."""
    trained: Tensor | None = None
    """int64: positions whose logits are computed."""

    @property
    def segments(self) -> AttentionSegments:
        """Segments of this rank: one per sequence, or two per sequence under context parallelism."""
        if self.context_segments is not None:
            return self.context_segments
        return AttentionSegments(
            query_offsets=self.cu_seqlens_q,
            key_offsets=self.cu_seqlens_q,
            query_ends=self.ends,
            key_ends=self.ends,
            longest_query=self.max_seqlen_q,
            longest_key=self.max_seqlen_q,
        )

    def rotate(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the rotary embedding, unless Megatron has done so."""
        if self.rotation is None:
            return query, key
        return self.rotation(query), self.rotation(key)


@dataclass(frozen=True, slots=True)
class ContextRank:
    """Position of a rank among the ranks that share the tokens of a micro-batch."""

    rank: int = 0
    ranks: int = 1
    """Number of ranks that share every sequence (context_parallel)."""
    scatter_ranks: int = 1
    """Number of ranks that the activations between matrix products are scattered over (tensor_parallel with
    sequence_parallel, else 1)."""


def lay_out_sequences(lengths: Sequence[int], context: ContextRank = ContextRank()) -> PackedSequences:
    """Lay out sequences of these lengths end to end; under context parallelism, lengths are padded ones
    (`padded_lengths`), and the segments are those of the rank at `context`.

    `cu_seqlens` are always those of the complete sequences: Megatron derives the positions of a part from them.
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
        packed.context_segments = _context_segments(lengths_N, context)
        return packed

    starts_N = lengths_N.cumsum(0) - lengths_N
    widths_N = (lengths_N + BUCKET - 1) // BUCKET * BUCKET
    token_of_cell = []
    is_token = []
    for width in widths_N.unique().tolist():
        in_bucket = widths_N == width
        starts_R1 = starts_N[in_bucket][:, None]
        lengths_R1 = lengths_N[in_bucket][:, None]
        column = torch.arange(width)

        # Padding repeats the last token of its row, so that every cell has a valid index.
        token_of_cell.append((starts_R1 + torch.minimum(column, lengths_R1 - 1)).flatten())
        is_token.append((column < lengths_R1).flatten())
        packed.buckets.append(LengthBucket(len(starts_R1), width))
    packed.cells = PaddedCells.of(torch.cat(token_of_cell), torch.cat(is_token))
    return packed


def _context_segments(lengths_N: Tensor, context: ContextRank) -> AttentionSegments:
    """Return two segments per sequence: this rank's chunk from the front, and its counterpart from the back.

    Each chunk attends to the keys up to its own end. The keys of all ranks are gathered in the order of the ranks and
    then selected into the order of their positions, once per segment. With n ranks a sequence has 2n chunks, and its
    two segments select 2n + 1 of them together.

        2 ranks, rank 0     queries  0 3        keys  0 | 0 1 2 3
                rank 1              1 2              0 1 | 0 1 2
    """
    ranks = context.ranks
    chunks_N = lengths_N // (2 * ranks)
    rank_tokens = int(lengths_N.sum()) // ranks
    starts_N = (lengths_N.cumsum(0) - lengths_N) // ranks
    front = context.rank
    back = 2 * ranks - 1 - context.rank

    keys = []
    for chunk, start in zip(chunks_N.tolist(), starts_N.tolist(), strict=True):
        # Rank r has chunk r at the start of its part of a sequence, followed by chunk 2n - 1 - r.
        front_starts = [rank * rank_tokens + start for rank in range(ranks)]
        back_starts = [rank * rank_tokens + start + chunk for rank in reversed(range(ranks))]
        chunk_starts = torch.tensor([*front_starts, *back_starts])[:, None]
        indices = (chunk_starts + torch.arange(chunk)).flatten()
        keys += [indices[: (front + 1) * chunk], indices[: (back + 1) * chunk]]

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
    """Return int32 [N + 1]: the start of each sequence, and the end of the last.

    >>> _offsets(torch.tensor([3, 5])).tolist()
    [0, 3, 8]
    """
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths_N.cumsum(0)]).to(torch.int32)
