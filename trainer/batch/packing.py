"""Which sequence goes to which data-parallel rank and into which micro-batch.

    Batch --sequences_of--> sequences --pack_batch--> indices by rank --micro_batch--> tensors of this rank

`pack_batch` is pure and deterministic, so every rank packs the whole batch and picks its share. It balances the cost of
attention within a sequence and of the matrices:

    cost of a sequence of n tokens = n + quadratic * n^2

The most expensive sequence goes first, each into the cheapest bin (LPT, Graham 1969): the most expensive bin costs at
most 4/3 of the optimum. This is done over ranks and then, within each rank, over micro-batches, which must not hold
more tokens than the budget. If that leaves a sequence without room, each goes into the fullest bin that has room (best
fit), which packs tighter; only if that fails too is another micro-batch added. All ranks get the same number of
micro-batches, because they meet in collective calls. A sequence without a trained token is not read at all.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron.core import parallel_state

from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError
from async_grpo.wire import Batch
from trainer.batch.sequences import MicroBatch, TrainingSequence, micro_batch, sequences_of

Bins = list[list[int]]


def pack_batch(lengths: Sequence[int], *, ranks: int, max_tokens: int, quadratic: float = 0.0) -> list[Bins]:
    """Indices of sequences as [rank][micro-batch][...]; a micro-batch holds at most `max_tokens`.

    Within a micro-batch the indices ascend. A micro-batch is empty only where a rank has fewer
    sequences than another needs micro-batches. Raises ConfigError for a sequence that is too long.

    >>> pack_batch([3, 3, 2, 4], ranks=2, max_tokens=4)
    [[[3], [2]], [[0], [1]]]
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ConfigError(
            f"a sequence of {longest} tokens does not fit into a micro-batch of {max_tokens}. "
            f"Raise trainer.micro_batch_tokens to {longest} or more, or set trainer.overlong to truncate or drop"
        )
    costs = [cost(length, quadratic) for length in lengths]
    shares = _spread(range(len(lengths)), costs, ranks)
    count = max(1, *(-(-_tokens(share, lengths) // max_tokens) for share in shares))
    while True:  # ends: with a bin for every sequence, everything fits
        packed = [bins for share in shares if (bins := _fit(share, lengths, costs, count, max_tokens)) is not None]
        if len(packed) == ranks:
            return packed
        count += 1


def cost(length: int, quadratic: float) -> float:
    """The cost of a sequence, in tokens of one that is too short for attention to matter."""
    return length + quadratic * length * length


def split_groups(groups: int, parts: int, *, seed: int, version: int, iteration: int) -> Bins:
    """Indices of the groups of each mini-batch, ascending; sizes differ by one at most.

    The order differs in every pass over every batch, and is always the same for the same arguments.
    """
    order = list(range(groups))
    random.Random(f"{seed}/{version}/{iteration}").shuffle(order)
    return [sorted(order[part::parts]) for part in range(parts)]


def _spread(members: Iterable[int], costs: Sequence[float], bins: int) -> Bins:
    """Members over `bins` bins, their costs as equal as LPT makes them."""
    heap = [(0.0, number) for number in range(bins)]
    filled: Bins = [[] for _ in range(bins)]
    for index in _dearest_first(members, costs):
        load, number = heapq.heappop(heap)
        filled[number].append(index)
        heapq.heappush(heap, (load + costs[index], number))
    return [sorted(bin_) for bin_ in filled]


def _fit(
    members: Sequence[int],
    lengths: Sequence[int],
    costs: Sequence[float],
    count: int,
    max_tokens: int,
) -> Bins | None:
    """Members over `count` bins within the budget; None if no way was found."""
    balanced = _spread(members, costs, count)
    if all(_tokens(bin_, lengths) <= max_tokens for bin_ in balanced):
        return balanced
    filled: Bins = [[] for _ in range(count)]
    room = [max_tokens] * count
    for index in _dearest_first(members, costs):
        fitting = [number for number in range(count) if room[number] >= lengths[index]]
        if not fitting:
            return None
        tightest = min(fitting, key=lambda number: (room[number], number))
        filled[tightest].append(index)
        room[tightest] -= lengths[index]
    return [sorted(bin_) for bin_ in filled]


def _dearest_first(members: Iterable[int], costs: Sequence[float]) -> list[int]:
    return sorted(members, key=lambda index: (-costs[index], index))


def _tokens(members: Iterable[int], lengths: Sequence[int]) -> int:
    return sum(lengths[i] for i in members)


class PackedBatch(NamedTuple):
    """The sequences of a batch, divided among ranks and micro-batches."""

    micro_batches: list[MicroBatch]
    """The micro-batches of this data-parallel rank."""
    lengths: list[int]
    """Tokens of each sequence that some rank reads."""
    slots: int
    """Tokens that the micro-batches of all ranks have room for."""
    balance: float
    """Mean cost of a rank / largest cost of a rank; 1 if all have the same work."""


def sequences_in(batch: Batch, config: RunConfig, squares: Sequence[float] | None = None) -> list[TrainingSequence]:
    """The sequences of a batch; trainer.overlong decides what happens to those that are too long. `squares`: as in
    `group_advantages`."""
    trainer = config.trainer
    room = None if trainer.overlong == "error" else trainer.micro_batch_tokens
    longest, rules = config.sampling.max_tokens, trainer.objective
    truncate = trainer.overlong == "truncate"
    return sequences_of(batch, rules, longest, room=room, truncate=truncate, squares=squares)


def pack(sequences: Sequence[TrainingSequence], config: RunConfig, quadratic: float) -> PackedBatch:
    """Divide the sequences among ranks and micro-batches; `quadratic`: see the module.

    Raises ConfigError for a sequence that is too long, with `overlong: error`.
    """
    read = [sequence for sequence in sequences if sequence.trained_tokens]
    lengths = [sequence.length for sequence in read]
    ranks, room = parallel_state.get_data_parallel_world_size(), config.trainer.micro_batch_tokens
    packing = pack_batch(lengths, ranks=ranks, max_tokens=room, quadratic=quadratic)
    mine = packing[parallel_state.get_data_parallel_rank()]
    micro_batches = [micro_batch([read[i] for i in chosen]) for chosen in mine]
    balance = _balance(packing, [cost(length, quadratic) for length in lengths])
    return PackedBatch(micro_batches, lengths, ranks * len(mine) * room, balance)


def pack_for_rank(batch: Batch, config: RunConfig, quadratic: float = 0.0) -> PackedBatch:
    """The sequences of a batch, divided among ranks and micro-batches."""
    return pack(sequences_in(batch, config), config, quadratic)


def _balance(packing: Sequence[Bins], costs: Sequence[float]) -> float:
    loads = [sum(costs[i] for chosen in bins for i in chosen) for bins in packing]
    return sum(loads) / (len(loads) * max(loads)) if max(loads) > 0 else 1.0
