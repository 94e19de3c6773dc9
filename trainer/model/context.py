"""This rank's part of packed sequences that several ranks share.

    sequence, padded to 2n chunks      0  1  2  3      n = 2 ranks
    rank 0 has                         0        3
    rank 1 has                            1  2

A later token attends to more than an earlier one: with a chunk from the front and its counterpart from the back
(zig-zag, as Megatron's rotary embeddings and Transformer Engine expect it), every rank has the same work. Keys and
values of all ranks are gathered; a query sees those up to its own position, so padding at the end is never seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.model.spec import BUCKET, Bucket, Cells, Keys, PackedSequences, pack


@dataclass(frozen=True, slots=True)
class Place:
    """Of a rank among those that share the tokens of a micro-batch."""

    rank: int = 0
    ranks: int = 1
    """That share every sequence (context_parallel)."""
    scattered: int = 1
    """That share the activations of a part between the matrices (tensor_parallel, if sequence_parallel)."""


def padded_lengths(lengths: Sequence[int], place: Place) -> list[int]:
    """Each a multiple of 2n, so that it falls into chunks; the last longer still, so that every part can be scattered.

    >>> padded_lengths([5, 8], Place(ranks=2, scattered=3))
    [8, 16]
    """
    chunks = 2 * place.ranks if place.ranks > 1 else 1
    padded = [-(-length // chunks) * chunks for length in lengths]
    multiple = math.lcm(chunks, place.ranks * place.scattered)
    padded[-1] += -sum(padded) % multiple
    return padded


def positions_of(length: int, place: Place) -> Tensor:
    """int64: the positions of a (padded) sequence that this rank has, in its order.

    >>> positions_of(8, Place(rank=1, ranks=2)).tolist()
    [2, 3, 4, 5]
    """
    if place.ranks == 1:
        return torch.arange(length)
    chunk = length // (2 * place.ranks)
    front, back = place.rank * chunk, (2 * place.ranks - 1 - place.rank) * chunk
    return torch.cat([torch.arange(front, front + chunk), torch.arange(back, back + chunk)])


def pack_part(lengths: Sequence[int], place: Place) -> PackedSequences:
    """Padded lengths of whole sequences -> the description of this rank's part of them.

    The offsets are those of the whole sequences, from which Megatron finds the positions of the part by itself.
    """
    whole = pack(lengths)
    if place.ranks == 1:
        return whole
    lengths_N = torch.tensor(lengths)
    locals_N = lengths_N // place.ranks
    starts_N = locals_N.cumsum(0) - locals_N
    step = BUCKET * place.ranks
    widths_N = (lengths_N + step - 1) // step * step
    order, buckets = [], []
    for width in widths_N.unique().tolist():
        members = widths_N == width
        bucket, tokens = _bucket(starts_N[members], lengths_N[members], width, int(locals_N.sum()), place)
        buckets.append(bucket)
        order.append(tokens)
    whole.buckets, whole.cells = buckets, Cells.of(buckets, torch.cat(order))
    return whole


def _bucket(starts_R: Tensor, lengths_R: Tensor, width: int, tokens: int, place: Place) -> tuple[Bucket, Tensor]:
    """The rectangle of R parts, and the tokens of the part in the order of its real cells.

    `starts_R`: of the parts; `tokens`: of all parts of one rank.
    """
    starts_R1, locals_R1 = starts_R[:, None], lengths_R[:, None] // place.ranks
    column = torch.arange(width // place.ranks)
    real_RW = column < locals_R1
    gather_RW = starts_R1 + torch.minimum(column, locals_R1 - 1)
    keys = _keys(starts_R1, lengths_R[:, None], width, tokens, place)
    bucket = Bucket(len(starts_R), len(column), gather_RW.flatten(), real_RW.flatten().nonzero()[:, 0], keys)
    return bucket, gather_RW[real_RW]


def _keys(starts_R1: Tensor, lengths_R1: Tensor, width: int, tokens: int, place: Place) -> Keys:
    chunk_R1 = lengths_R1 // (2 * place.ranks)
    position = torch.arange(width)
    key_RK = torch.minimum(position, lengths_R1 - 1)
    number_RK, offset_RK = key_RK // chunk_R1, key_RK % chunk_R1
    back_RK = number_RK >= place.ranks
    owner_RK = torch.where(back_RK, 2 * place.ranks - 1 - number_RK, number_RK)
    gather_RK = owner_RK * tokens + starts_R1 + offset_RK + back_RK * chunk_R1
    column = torch.minimum(torch.arange(width // place.ranks), 2 * chunk_R1 - 1)
    front_R1, back_R1 = place.rank * chunk_R1, (2 * place.ranks - 2 - place.rank) * chunk_R1
    query_RW = column + torch.where(column < chunk_R1, front_R1, back_R1)
    return Keys(width, gather_RK.flatten(), (query_RW[:, None, :, None] >= position))
