"""All runs of the bench, by staleness and repetition, and what they say when they are compared. Pure.

Runs of one repetition follow each other, so what slows the machine down for a while slows down a value and its
baseline alike: ratios are taken within a repetition, and of these the median.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from async_grpo.bench.pipeline.balance import Sides
from async_grpo.bench.pipeline.observe import Observed


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one figure over the repetitions."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """At least one value."""
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Results:
    """`by_staleness[S]` has one entry a repetition; S = 0 is always there."""

    by_staleness: Mapping[int, Sequence[Observed]]

    @property
    def staleness(self) -> list[int]:
        """Ascending."""
        return sorted(self.by_staleness)

    @property
    def sides(self) -> list[Sides]:
        """T_gen and T_train of every repetition, from its run with S = 0."""
        return [Sides(one.wait_s, one.step_s - one.wait_s) for one in self.by_staleness[0]]

    def spread(self, staleness: int, figure: Callable[[Observed], float]) -> Spread:
        """A figure of that staleness."""
        return Spread.of([figure(one) for one in self.by_staleness[staleness]])

    def speedup(self, staleness: int) -> Spread:
        """Tokens a second to those of S = 0, repetition by repetition."""
        return Spread.of(self._speedups(staleness))

    def share_of_bound(self, staleness: int) -> Spread:
        """The same, to the overlap bound of the repetition."""
        pairs = zip(self._speedups(staleness), self.sides, strict=True)
        return Spread.of([speedup / sides.bound for speedup, sides in pairs])

    def _speedups(self, staleness: int) -> list[float]:
        pairs = zip(self.by_staleness[staleness], self.by_staleness[0], strict=True)
        return [one.tokens_per_s / sync.tokens_per_s for one, sync in pairs]


def in_turns(staleness: Sequence[int], repetitions: int) -> list[tuple[int, int]]:
    """(repetition, S), every repetition beginning one further along, so that no S is always first.

    >>> in_turns([0, 2], 2)
    [(0, 0), (0, 2), (1, 2), (1, 0)]
    """
    order = list(staleness)
    turns = []
    for repetition in range(repetitions):
        first = repetition % len(order)
        turns += [(repetition, one) for one in [*order[first:], *order[:first]]]
    return turns
