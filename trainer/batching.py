"""Which sequence goes to which data-parallel rank and into which micro-batch. Pure and deterministic.

Longest first, each into the emptiest bin (LPT, Graham 1969): the fullest bin is at most 4/3 of the
best possible. First over ranks, then, within each rank, over micro-batches. All ranks get the same
number of micro-batches, because they meet in collective calls.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from async_grpo.errors import ConfigError

Bins = list[list[int]]


def pack_batch(lengths: Sequence[int], *, ranks: int, max_tokens: int) -> list[Bins]:
    """Indices of sequences as [rank][micro-batch][...]; a micro-batch holds at most `max_tokens`.

    Within a micro-batch the indices ascend. A micro-batch is empty only where a rank has fewer
    sequences than another needs micro-batches. Raises ConfigError for a sequence that is too long.

    >>> pack_batch([3, 3, 2, 4], ranks=2, max_tokens=4)
    [[[3], [2]], [[0], [1]]]
    """
    longest = max(lengths)
    if longest > max_tokens:
        raise ConfigError(
            f"a sequence of {longest} tokens does not fit into a micro-batch of {max_tokens}. "
            f"Raise trainer.micro_batch_tokens to {longest} or more"
        )
    shares = _spread(range(len(lengths)), lengths, ranks)
    count = max(-(-_tokens(share, lengths) // max_tokens) for share in shares)
    while True:  # ends: with a bin for every sequence, everything fits
        packed = [_spread(share, lengths, count) for share in shares]
        if all(_tokens(bin_, lengths) <= max_tokens for bins in packed for bin_ in bins):
            return packed
        count += 1


def _spread(members: Iterable[int], lengths: Sequence[int], bins: int) -> Bins:
    """Members over `bins` bins, their token counts as equal as LPT makes them."""
    heap = [(0, number) for number in range(bins)]
    filled: Bins = [[] for _ in range(bins)]
    for index in sorted(members, key=lambda i: (-lengths[i], i)):
        tokens, number = heapq.heappop(heap)
        filled[number].append(index)
        heapq.heappush(heap, (tokens + lengths[index], number))
    return [sorted(bin_) for bin_ in filled]


def _tokens(members: Iterable[int], lengths: Sequence[int]) -> int:
    return sum(lengths[i] for i in members)
