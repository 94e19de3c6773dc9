"""Assigns sequences to data-parallel ranks and micro-batches.

    Batch --build_sequences--> sequences --assign_sequences--> indices per rank --make_micro_batch--> own tensors

`assign_sequences` is pure and deterministic, so every rank computes the assignment of the whole batch and takes its own
part. It balances the cost of attention, which is quadratic in the length, and of matrix products, which is linear:

    cost of a sequence of n tokens = n + quadratic * n^2

Sequences are placed in order of decreasing cost, each into the bin with the lowest cost so far (LPT, Graham 1969): the
most expensive bin costs at most 4/3 of the optimum. This is done over ranks first and then, within each rank, over
micro-batches, which have a token budget. If a sequence does not fit, the rank is packed again with best fit (the
fullest bin that has room), which is tighter but less balanced. If that fails too, one more micro-batch is added. All
ranks get the same number of micro-batches, because they meet in collective calls. Sequences without a trained token
are not read at all.
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
from trainer.batch.sequences import MicroBatch, TrainingSequence, make_micro_batch, split_into_sequences

Bins = list[list[int]]
"""Indices of the members of each bin."""


class PackedBatch(NamedTuple):
    """The micro-batches of this rank, and statistics over all data-parallel ranks."""

    micro_batches: list[MicroBatch]
    """Micro-batches of this data-parallel rank."""
    lengths: list[int]
    """Number of tokens of each sequence with a trained token, over all ranks."""
    token_capacity: int
    """Total token budget of the micro-batches of all ranks."""
    balance: float
    """Mean cost of a rank / largest cost of a rank; 1 if all have the same work."""


def own_micro_batches(batch: Batch, config: RunConfig) -> list[MicroBatch]:
    """Return this rank's micro-batches of a batch that is only measured, balanced by tokens alone."""
    return build_micro_batches(build_sequences(batch, config), config, quadratic=0.0).micro_batches


def build_sequences(
    batch: Batch, config: RunConfig, squared_weights: Sequence[float] | None = None
) -> list[TrainingSequence]:
    """Split a batch into sequences as configured; `trainer.overlong` decides about those that are too long.

    `squared_weights`: see `group_advantages`.
    """
    trainer = config.trainer
    return split_into_sequences(
        batch,
        trainer.objective,
        config.sampling.max_tokens,
        reward_weights={function.name: function.weight for function in config.rewards.functions},
        max_sequence_tokens=None if trainer.overlong == "error" else trainer.micro_batch_tokens,
        truncate=trainer.overlong == "truncate",
        squared_weights=squared_weights,
    )


def build_micro_batches(sequences: Sequence[TrainingSequence], config: RunConfig, quadratic: float) -> PackedBatch:
    """Assign the sequences of a batch to ranks and micro-batches, and build the tensors of this rank.

    `quadratic`: cost of attention relative to matrix products, see the module. Raises ConfigError for a sequence that
    is too long, with `overlong: error`.
    """
    trained = [sequence for sequence in sequences if sequence.trained_tokens]
    lengths = [sequence.length for sequence in trained]
    ranks = parallel_state.get_data_parallel_world_size()
    max_tokens = config.trainer.micro_batch_tokens

    assignment = assign_sequences(lengths, ranks=ranks, max_tokens=max_tokens, quadratic=quadratic)
    own_bins = assignment[parallel_state.get_data_parallel_rank()]
    return PackedBatch(
        micro_batches=[make_micro_batch([trained[index] for index in bin_]) for bin_ in own_bins],
        lengths=lengths,
        token_capacity=ranks * len(own_bins) * max_tokens,
        balance=_measure_balance(assignment, [cost(length, quadratic) for length in lengths]),
    )


def assign_sequences(lengths: Sequence[int], *, ranks: int, max_tokens: int, quadratic: float = 0.0) -> list[Bins]:
    """Return indices of sequences as [rank][micro-batch][...]; a micro-batch has at most `max_tokens` tokens.

    Within a micro-batch the indices ascend. All ranks have the same number of micro-batches, so some may be empty.
    Raises ConfigError for a sequence that is too long.

    >>> assign_sequences([3, 3, 2, 4], ranks=2, max_tokens=4)
    [[[3], [2]], [[0], [1]]]
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ConfigError(
            f"a sequence of {longest} tokens does not fit into a micro-batch of {max_tokens}. "
            f"Raise trainer.micro_batch_tokens to {longest} or more, or set trainer.overlong to truncate or drop"
        )
    costs = [cost(length, quadratic) for length in lengths]
    rank_members = _distribute_over_bins(range(len(lengths)), costs, ranks)

    # Start with the fewest micro-batches that could hold the tokens of every rank. The loop ends at the latest with one
    # micro-batch per sequence, where everything fits.
    count = max(1, *(-(-_count_tokens(members, lengths) // max_tokens) for members in rank_members))
    while True:
        assignment = []
        for members in rank_members:
            bins = _fit_into_bins(members, lengths, costs, count, max_tokens)
            if bins is not None:
                assignment.append(bins)
        if len(assignment) == ranks:
            return assignment
        count += 1


def cost(length: int, quadratic: float) -> float:
    """Return the cost of a sequence, in units of the matrix products of one token.

    `quadratic`: cost of attention per pair of tokens, in the same unit.
    """
    return length + quadratic * length * length


def split_groups(groups: int, parts: int, *, seed: int, version: int, iteration: int) -> Bins:
    """Return the indices of the groups of each mini-batch, ascending; sizes differ by one at most.

    Every pass over a batch has another order. The same arguments give the same order.
    """
    order = list(range(groups))
    random.Random(f"{seed}/{version}/{iteration}").shuffle(order)
    return [sorted(order[part::parts]) for part in range(parts)]


def _distribute_over_bins(members: Iterable[int], costs: Sequence[float], count: int) -> Bins:
    """Distribute the members over `count` bins of similar cost (LPT)."""
    heap = [(0.0, number) for number in range(count)]
    bins: Bins = [[] for _ in range(count)]
    for index in _sort_by_cost_descending(members, costs):
        load, number = heapq.heappop(heap)
        bins[number].append(index)
        heapq.heappush(heap, (load + costs[index], number))
    return [sorted(bin_) for bin_ in bins]


def _fit_into_bins(
    members: Sequence[int],
    lengths: Sequence[int],
    costs: Sequence[float],
    count: int,
    max_tokens: int,
) -> Bins | None:
    """Distribute the members over `count` bins of `max_tokens` each. Returns None if they do not fit."""
    balanced = _distribute_over_bins(members, costs, count)
    if all(_count_tokens(bin_, lengths) <= max_tokens for bin_ in balanced):
        return balanced

    bins: Bins = [[] for _ in range(count)]
    room = [max_tokens] * count
    for index in _sort_by_cost_descending(members, costs):
        fitting = [number for number in range(count) if room[number] >= lengths[index]]
        if not fitting:
            return None
        tightest = min(fitting, key=lambda number: (room[number], number))
        bins[tightest].append(index)
        room[tightest] -= lengths[index]
    return [sorted(bin_) for bin_ in bins]


def _sort_by_cost_descending(members: Iterable[int], costs: Sequence[float]) -> list[int]:
    # Ties are broken by index: every rank must compute the same assignment.
    return sorted(members, key=lambda index: (-costs[index], index))


def _count_tokens(members: Iterable[int], lengths: Sequence[int]) -> int:
    return sum(lengths[index] for index in members)


def _measure_balance(assignment: Sequence[Bins], costs: Sequence[float]) -> float:
    loads = [sum(costs[index] for bin_ in bins for index in bin_) for bins in assignment]
    if max(loads) == 0:
        return 1.0
    return sum(loads) / (len(loads) * max(loads))
