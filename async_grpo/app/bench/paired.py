"""Rounds of two feeders in turn, so that the noise of the machine cancels.

    whole, baseline | baseline, whole | whole, baseline | ...     ratio of each pair, and of these the median

What slows the machine down for a while slows down both rounds of a pair; the order alternates, so that
being second favours neither.

Rounds of several contestants in turn, so that what slows the machine down for a while slows down all of them.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median

from async_grpo.app.bench.rollout.workload import RolloutWork
from async_grpo.errors import TrainingError


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


Feeder = Callable[[RolloutWork], Awaitable[Round]]
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


async def in_pairs(whole: Feeder, baseline: Feeder, work: RolloutWork, count: int, step: Callable[[], None]) -> Pairs:
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


async def one_round(feeder: Feeder, work: RolloutWork) -> Round:
    """The work, done and checked."""
    done = await feeder(work)
    work.check(done.tokens)
    return done


TOLERANCE = 1e-4
"""Of losses, absolute, and of gradient norms, relative."""


@dataclass(frozen=True, slots=True)
class BenchStep:
    """What a step of a contestant came to."""

    loss: float
    grad_norm: float
    efficiency: float
    """Tokens of sequences / positions computed."""


Contestant = Callable[[], BenchStep]
"""Makes one step over the batch, from the same weights as everybody."""


@dataclass(slots=True)
class Timed:
    """Rounds of one contestant: seconds on the clock, seconds of processor time; `done` is of the last."""

    seconds: list[float]
    cpu_s: list[float]
    """Of all threads. On a busy machine it says more than the clock."""
    done: BenchStep


def in_turns(contestants: Mapping[str, Contestant], rounds: int, say: Callable[[str], None]) -> dict[str, Timed]:
    """All of them `rounds` times, in alternating order; `say` gets the name of each when its turn is done.

    Raises TrainingError if they do not come to the same loss and gradient.
    """
    found: dict[str, Timed] = {}
    for number in range(rounds):
        names = list(contestants)
        for name in names if number % 2 == 0 else reversed(names):
            started, started_cpu = time.perf_counter(), time.process_time()
            done = contestants[name]()
            timed = found.setdefault(name, Timed([], [], done))
            timed.seconds.append(time.perf_counter() - started)
            timed.cpu_s.append(time.process_time() - started_cpu)
            timed.done = done
            say(name)
    _check(found)
    return {name: found[name] for name in contestants}


def ratio(first: Timed, second: Timed) -> float:
    """How many times as fast the first is: the median over the rounds."""
    return median(b / a for a, b in zip(first.seconds, second.seconds, strict=True))


def cpu_ratio(first: Timed, second: Timed) -> float:
    """Processor time of the first to that of the second: the median over the rounds."""
    return median(a / b for a, b in zip(first.cpu_s, second.cpu_s, strict=True))


def _check(found: Mapping[str, Timed]) -> None:
    first_name, first = next(iter(found.items()))
    for name, timed in found.items():
        loss, norm = timed.done.loss - first.done.loss, timed.done.grad_norm / first.done.grad_norm - 1
        if not (abs(loss) <= TOLERANCE and abs(norm) <= TOLERANCE):  # neither if one is nan
            raise TrainingError(
                f"{name} comes to a loss of {timed.done.loss:.6g} and a gradient norm of {timed.done.grad_norm:.6g}, "
                f"{first_name} to {first.done.loss:.6g} and {first.done.grad_norm:.6g}: they would not do the same "
                "work, and their speeds would not compare"
            )
