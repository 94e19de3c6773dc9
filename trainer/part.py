"""Which tokens of a micro-batch this rank reads, when ranks share sequences or activations.

    micro-batch --part_of--> tokens of this rank --network--> log-probabilities of its trained tokens
                                                                        |  fill_in over the ranks
    loss of the whole micro-batch, on every rank alike  <---------------+

So nothing outside of the forward pass sees that a sequence was shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from torch import Tensor

from trainer.model.context import Place, pack_part, padded_lengths, positions_of
from trainer.model.exchange import fill_in
from trainer.model.spec import PackedSequences
from trainer.sequences import MicroBatch


@dataclass(frozen=True, slots=True)
class Part:
    """T positions of this rank, M of which predict a trained token."""

    tokens_1T: Tensor
    positions_1T: Tensor
    packing: PackedSequences
    trained_M: Tensor
    """int64: positions of the part whose prediction is trained."""
    mine_M: Tensor | None
    """int64: which of the trained tokens of the micro-batch they are; None if all."""

    def own(self, values_N: Tensor) -> Tensor:
        """Of all trained tokens -> of those of this rank."""
        return values_N if self.mine_M is None else values_N.index_select(0, self.mine_M)

    def whole(self, values_M: Tensor, count: int) -> Tensor:
        """Of the trained tokens of this rank -> of all `count`, by way of the ranks that share the sequences."""
        if self.mine_M is None:
            return values_M
        return fill_in(values_M, self.mine_M, count, parallel_state.get_context_parallel_group())


def own_place(sequence_parallel: bool) -> Place:
    """Of this rank, as the ranks are laid out now."""
    return Place(
        rank=parallel_state.get_context_parallel_rank(),
        ranks=parallel_state.get_context_parallel_world_size(),
        scattered=parallel_state.get_tensor_model_parallel_world_size() if sequence_parallel else 1,
    )


def part_of(batch: MicroBatch, place: Place) -> Part:
    """What the rank at `place` reads of a micro-batch."""
    lengths = batch.packing.cu_seqlens_q.diff().tolist()
    padded = padded_lengths(lengths, place)
    if place.ranks == 1 and padded == lengths:
        return Part(batch.tokens_1T, batch.positions_1T, batch.packing, batch.trained_N, None)
    positions = [positions_of(length, place) for length in padded]
    sources_T, real_T = _sources(positions, lengths)
    place_T = torch.full((batch.tokens_1T.shape[1],), -1)
    place_T[sources_T[real_T]] = real_T.nonzero()[:, 0]
    place_N = place_T[batch.trained_N]
    mine_M = (place_N >= 0).nonzero()[:, 0]
    return Part(
        tokens_1T=batch.tokens_1T.index_select(1, sources_T),
        positions_1T=torch.cat(positions)[None],
        packing=pack_part(padded, place),
        trained_M=place_N[mine_M],
        mine_M=None if place.ranks == 1 else mine_M,
    )


def _sources(positions: Sequence[Tensor], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Where each token of the part lies in the micro-batch; and whether it does, or pads (with a copy of the last)."""
    starts_N = torch.tensor([0, *lengths]).cumsum(0)
    members = list(zip(starts_N, positions, lengths, strict=False))  # the last start has no sequence
    sources = [start + place.clamp(max=length - 1) for start, place, length in members]
    real = [place < length for _, place, length in members]
    return torch.cat(sources), torch.cat(real)
