"""Rounds of two feeders in turn, so that the noise of the machine cancels.

    whole, baseline | baseline, whole | whole, baseline | ...     ratio of each pair, and of these the median

What slows the machine down for a while slows down both rounds of a pair; the order alternates, so that
being second favours neither.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from statistics import median

from async_grpo.bench.rollout.work import Work


@dataclass(frozen=True, slots=True)
class Round:
    """What one round made and took: the tokens of every completion, in the order of the requests; seconds on the
    clock; seconds of this process's CPU time."""

    tokens: list[int]
    seconds: float
    cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        """Of the whole round, in which the engine fills up and runs empty."""
        return sum(self.tokens) / self.seconds

    @property
    def cpu_us_per_token(self) -> float:
        """Of the feeding process; the engine has its own."""
        return 1e6 * self.cpu_s / sum(self.tokens)


Feeder = Callable[[Work], Awaitable[Round]]
"""Has a round's work done."""


class Clock:
    """Runs from its making."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._cpu_s = time.process_time()

    def stop(self) -> tuple[float, float]:
        """Seconds on the clock and of CPU time so far."""
        return time.perf_counter() - self._started_s, time.process_time() - self._cpu_s


@dataclass(frozen=True, slots=True)
class Pairs:
    """Rounds of the whole server and of its baseline, pair by pair; each did the same work."""

    whole: list[Round]
    baseline: list[Round]

    @property
    def ratios(self) -> list[float]:
        """Speed of the whole to that of the baseline, ascending."""
        return sorted(a.tokens_per_s / b.tokens_per_s for a, b in zip(self.whole, self.baseline, strict=True))

    @property
    def ratio(self) -> float:
        """The median of the pairs' ratios."""
        return median(self.ratios)


async def in_pairs(whole: Feeder, baseline: Feeder, work: Work, count: int, step: Callable[[], None]) -> Pairs:
    """`count` pairs, after a short round of each that warms up; `step` is called after every pair.

    Raises EngineError if a round did not make exactly the tokens of `work`.
    """
    for feeder in (whole, baseline):
        await one_round(feeder, replace(work, groups=work.groups_per_step))
    pairs = Pairs([], [])
    for number in range(count):
        turns = [(whole, pairs.whole), (baseline, pairs.baseline)]
        for feeder, rounds in turns if number % 2 == 0 else reversed(turns):
            rounds.append(await one_round(feeder, work))
        step()
    return pairs


async def one_round(feeder: Feeder, work: Work) -> Round:
    """The work, done and checked."""
    done = await feeder(work)
    work.check(done.tokens)
    return done
