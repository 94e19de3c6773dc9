"""This rank's part of packed sequences under context parallelism, where several ranks share each sequence.

    sequence, padded to 2n chunks      0  1  2  3      n = 2 ranks
    rank 0 has                         0        3
    rank 1 has                            1  2

A later token attends to more tokens than an earlier one. Each rank therefore takes a chunk from the front and its
counterpart from the back (zig-zag, as Megatron's rotary embeddings and Transformer Engine expect it), so that all ranks
have the same work. Keys and values of all ranks are gathered, and each query attends to those up to its own position.
Padding is at the end of a sequence, so no real token attends to it. For a variable-length kernel both chunks are causal
segments (`AttentionSegments`), which need no mask.

    micro-batch --select_rank_tokens--> tokens of this rank --network--> log-probabilities of its trained tokens
                                                                              |  merge_token_values over the ranks
    loss of the complete micro-batch, computed by every rank  <---------------+

Code outside the forward pass does not depend on how sequences are shared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from trainer.batch.layout import ContextRank, PackedSequences, lay_out_sequences
from trainer.batch.sequences import MicroBatch


def padded_lengths(lengths: Sequence[int], context: ContextRank) -> list[int]:
    """Pad each length to a multiple of 2n, so that it can be cut into chunks.

    The last one is padded further, so that the tokens of a rank can be scattered over `context.scatter_ranks`.

    >>> padded_lengths([5, 8], ContextRank(ranks=2, scatter_ranks=3))
    [8, 16]
    """
    chunks = 2 * context.ranks if context.ranks > 1 else 1
    padded = [-(-length // chunks) * chunks for length in lengths]
    multiple = math.lcm(chunks, context.ranks * context.scatter_ranks)
    padded[-1] += -sum(padded) % multiple
    return padded


def rank_positions(length: int, context: ContextRank) -> Tensor:
    """Return the positions of a (padded) sequence that the rank at `context` has, in its order: int64.

    >>> rank_positions(8, ContextRank(rank=1, ranks=2)).tolist()
    [2, 3, 4, 5]
    """
    if context.ranks == 1:
        return torch.arange(length)
    chunk = length // (2 * context.ranks)
    front = context.rank * chunk
    back = (2 * context.ranks - 1 - context.rank) * chunk
    return torch.cat([torch.arange(front, front + chunk), torch.arange(back, back + chunk)])


def gather_context(part: Tensor, group: Any) -> Tensor:
    """Gather [T, ...] of each rank into [ranks * T, ...], in the order of the ranks.

    Each rank uses the parts of all ranks, so the gradient of a part is the sum over ranks.
    """
    gathered: Tensor = _Gather.apply(part, group)
    return gathered


def merge_token_values(values_M: Tensor, own_M: Tensor, count: int, group: Any) -> Tensor:
    """Return the values of all `count` tokens, of which this rank computed those at indices `own_M`.

    Each token is computed by one rank. The loss that follows is computed by every rank on all tokens, so the gradient
    of an own value is complete on this rank: summing it over ranks would count it once per rank.
    """
    merged: Tensor = _MergeTokenValues.apply(values_M, own_M, count, group)
    return merged


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        ctx.shape = part.shape
        gathered = part.new_empty(group.size(), *part.shape)
        dist.all_gather(list(gathered.unbind()), part.contiguous(), group=group)
        return gathered.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        own = gradients[0].new_empty(ctx.shape)
        dist.reduce_scatter_tensor(own, gradients[0].contiguous(), group=ctx.group)
        return own, None


class _MergeTokenValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_M: Tensor, own_M: Tensor, count: int, group: Any) -> Tensor:
        ctx.save_for_backward(own_M)
        merged = values_M.new_zeros(count)
        merged[own_M] = values_M
        dist.all_reduce(merged, group=group)
        return merged

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (own_M,) = ctx.saved_tensors
        return gradients[0].index_select(0, own_M), None, None, None


@dataclass(frozen=True, slots=True)
class RankTokens:
    """T positions of this rank, M of which predict a trained token."""

    tokens_1T: Tensor
    positions_1T: Tensor
    packing: PackedSequences
    trained_M: Tensor
    """int64: positions in this part that predict a trained token."""
    own_M: Tensor | None
    """int64: their indices among the trained tokens of the micro-batch; None if this rank has all of them."""

    def select_own(self, values_N: Tensor) -> Tensor:
        """Select the values of this rank's trained tokens from those of all trained tokens."""
        if self.own_M is None:
            return values_N
        return values_N.index_select(0, self.own_M)

    def merge(self, values_M: Tensor, count: int) -> Tensor:
        """Return the values of all `count` trained tokens, merged over the ranks that share the sequences."""
        if self.own_M is None:
            return values_M
        return merge_token_values(values_M, self.own_M, count, parallel_state.get_context_parallel_group())


def current_context_rank(sequence_parallel: bool) -> ContextRank:
    """Return the position of this rank in the current parallel layout."""
    return ContextRank(
        rank=parallel_state.get_context_parallel_rank(),
        ranks=parallel_state.get_context_parallel_world_size(),
        scatter_ranks=parallel_state.get_tensor_model_parallel_world_size() if sequence_parallel else 1,
    )


def select_rank_tokens(batch: MicroBatch, context: ContextRank) -> RankTokens:
    """Return the tokens of a micro-batch that the rank at `context` reads."""
    lengths = batch.packing.cu_seqlens_q.diff().tolist()
    padded = padded_lengths(lengths, context)
    if context.ranks == 1 and padded == lengths:
        return RankTokens(batch.tokens_1T, batch.positions_1T, batch.packing, batch.trained_N, None)

    positions = [rank_positions(length, context) for length in padded]
    sources_T, is_token_T = _token_sources(positions, lengths)

    # Invert the selection: for each position of the micro-batch its position in this part, or -1 if another rank has
    # it. Padding is left out, because it repeats a token that may be trained.
    part_position = torch.full((batch.tokens_1T.shape[1],), -1)
    part_position[sources_T[is_token_T]] = is_token_T.nonzero()[:, 0]
    trained_N = part_position[batch.trained_N]
    own_M = (trained_N >= 0).nonzero()[:, 0]
    return RankTokens(
        tokens_1T=batch.tokens_1T.index_select(1, sources_T),
        positions_1T=torch.cat(positions)[None],
        packing=lay_out_sequences(padded, context),
        trained_M=trained_N[own_M],
        own_M=None if context.ranks == 1 else own_M,
    )


def _token_sources(positions: Sequence[Tensor], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return for each token of the part its position in the micro-batch, and True if it is not padding.

    Padding repeats the last token of its sequence.
    """
    starts_N = torch.tensor([0, *lengths]).cumsum(0)
    sources = []
    is_token = []
    for start, position, length in zip(starts_N, positions, lengths, strict=False):  # the last start has no sequence
        sources.append(start + position.clamp(max=length - 1))
        is_token.append(position < length)
    return torch.cat(sources), torch.cat(is_token)
