"""This rank's part of packed sequences that several ranks share (context parallelism).

    sequence, padded to 2n chunks      0  1  2  3      n = 2 ranks
    rank 0 has                         0        3
    rank 1 has                            1  2

A later token attends to more tokens than an earlier one. Each rank therefore takes a chunk from the front and its
counterpart from the back (zig-zag, as Megatron's rotary embeddings and Transformer Engine expect it), so that all ranks
have the same work. Keys and values of all ranks are gathered; a query sees those up to its own position, so padding at
the end is never seen. Both chunks are causal segments for a kernel of variable length (`AttentionSegments`), which
needs no mask.

    micro-batch --rank_tokens--> tokens of this rank --network--> log-probabilities of its trained tokens
                                                                        |  fill_in over the ranks
    loss of the whole micro-batch, on every rank alike  <---------------+

Nothing outside the forward pass needs to know that a sequence was shared.
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

from trainer.batch.packed import ContextRank, PackedSequences, pack
from trainer.batch.sequences import MicroBatch


def padded_lengths(lengths: Sequence[int], context: ContextRank) -> list[int]:
    """Pad each length to a multiple of 2n, to cut it into chunks, and the last one further, so that parts can be
    scattered.

    >>> padded_lengths([5, 8], ContextRank(ranks=2, scattered=3))
    [8, 16]
    """
    chunks = 2 * context.ranks if context.ranks > 1 else 1
    padded = [-(-length // chunks) * chunks for length in lengths]
    multiple = math.lcm(chunks, context.ranks * context.scattered)
    padded[-1] += -sum(padded) % multiple
    return padded


def positions_of(length: int, context: ContextRank) -> Tensor:
    """The positions of a (padded) sequence that this rank has, in its order: int64.

    >>> positions_of(8, ContextRank(rank=1, ranks=2)).tolist()
    [2, 3, 4, 5]
    """
    if context.ranks == 1:
        return torch.arange(length)
    chunk = length // (2 * context.ranks)
    front, back = context.rank * chunk, (2 * context.ranks - 1 - context.rank) * chunk
    return torch.cat([torch.arange(front, front + chunk), torch.arange(back, back + chunk)])


def gather_context(part: Tensor, group: Any) -> Tensor:
    """[T, ...] of each rank -> [ranks * T, ...] of all of them, in the order of the ranks.

    Every rank uses all of it, so the gradient of a part is the sum of what all ranks found for it.
    """
    gathered: Tensor = _Gather.apply(part, group)
    return gathered


def fill_in(values_M: Tensor, mine_M: Tensor, count: int, group: Any) -> Tensor:
    """The values of all `count` tokens, of which this rank computed those at `mine_M`; no two ranks compute the same
    one.

    What follows is computed by every rank alike, so the gradient of a value is the one found here, not a sum.
    """
    filled: Tensor = _FillIn.apply(values_M, mine_M, count, group)
    return filled


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.shape = group, part.shape
        gathered = part.new_empty(group.size(), *part.shape)
        dist.all_gather(list(gathered.unbind()), part.contiguous(), group=group)
        return gathered.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        own = gradients[0].new_empty(ctx.shape)
        dist.reduce_scatter_tensor(own, gradients[0].contiguous(), group=ctx.group)
        return own, None


class _FillIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_M: Tensor, mine_M: Tensor, count: int, group: Any) -> Tensor:
        ctx.save_for_backward(mine_M)
        filled = values_M.new_zeros(count)
        filled[mine_M] = values_M
        dist.all_reduce(filled, group=group)
        return filled

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (mine_M,) = ctx.saved_tensors
        return gradients[0].index_select(0, mine_M), None, None, None


@dataclass(frozen=True, slots=True)
class RankTokens:
    """T positions of this rank, M of which predict a trained token."""

    tokens_1T: Tensor
    positions_1T: Tensor
    packing: PackedSequences
    trained_M: Tensor
    """int64: positions of the part whose prediction is trained."""
    mine_M: Tensor | None
    """int64: which of the trained tokens of the micro-batch they are; None if all."""

    def own(self, values_N: Tensor) -> Tensor:
        """Select the values of this rank's trained tokens from those of all trained tokens."""
        return values_N if self.mine_M is None else values_N.index_select(0, self.mine_M)

    def whole(self, values_M: Tensor, count: int) -> Tensor:
        """Gather the values of all `count` trained tokens over the ranks that share the sequences."""
        if self.mine_M is None:
            return values_M
        return fill_in(values_M, self.mine_M, count, parallel_state.get_context_parallel_group())


def own_context_rank(sequence_parallel: bool) -> ContextRank:
    """The position of this rank in the present layout of the ranks."""
    return ContextRank(
        rank=parallel_state.get_context_parallel_rank(),
        ranks=parallel_state.get_context_parallel_world_size(),
        scattered=parallel_state.get_tensor_model_parallel_world_size() if sequence_parallel else 1,
    )


def rank_tokens(batch: MicroBatch, context: ContextRank) -> RankTokens:
    """The tokens of a micro-batch that the rank at `context` reads."""
    lengths = batch.packing.cu_seqlens_q.diff().tolist()
    padded = padded_lengths(lengths, context)
    if context.ranks == 1 and padded == lengths:
        return RankTokens(batch.tokens_1T, batch.positions_1T, batch.packing, batch.trained_N, None)
    positions = [positions_of(length, context) for length in padded]
    sources_T, real_T = _sources(positions, lengths)
    place_T = torch.full((batch.tokens_1T.shape[1],), -1)
    place_T[sources_T[real_T]] = real_T.nonzero()[:, 0]
    place_N = place_T[batch.trained_N]
    mine_M = (place_N >= 0).nonzero()[:, 0]
    return RankTokens(
        tokens_1T=batch.tokens_1T.index_select(1, sources_T),
        positions_1T=torch.cat(positions)[None],
        packing=pack(padded, context),
        trained_M=place_N[mine_M],
        mine_M=None if context.ranks == 1 else mine_M,
    )


def _sources(positions: Sequence[Tensor], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The place of each token of the part in the micro-batch, and whether it is real: padding repeats the last one."""
    starts_N = torch.tensor([0, *lengths]).cumsum(0)
    members = list(zip(starts_N, positions, lengths, strict=False))  # the last start has no sequence
    sources = [start + position.clamp(max=length - 1) for start, position, length in members]
    real = [position < length for _, position, length in members]
    return torch.cat(sources), torch.cat(real)
