"""Rounds of several contestants in turn, so that the noise of the machine cancels.

    whole, baseline | baseline, whole | whole, baseline | ...     the ratio of each pair, and their median

What slows the machine down for a while slows down all rounds of a turn. The order alternates, so that being second
favours none.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median

from async_grpo.app.bench.rollout.workload import RolloutWork
from async_grpo.errors import TrainingError


@dataclass(frozen=True, slots=True)
class RolloutRound:
    """What one round made and took.

    tokens: tokens of every completion, in the order of the requests. seconds: on the clock. cpu_s: CPU seconds of this
    process.
    """

    tokens: list[int]
    seconds: float
    cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        """Speed over the whole round, in which the engine fills up and runs empty."""
        return sum(self.tokens) / self.seconds

    @property
    def cpu_us_per_token(self) -> float:
        """CPU time of the feeding process, without that of the engine's processes."""
        return 1e6 * self.cpu_s / sum(self.tokens)


Feeder = Callable[[RolloutWork], Awaitable[RolloutRound]]
"""Does the work of one round."""


class Clock:
    """A stopwatch that starts when it is made."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._cpu_s = time.process_time()

    def stop(self) -> tuple[float, float]:
        """Seconds on the clock and of CPU time so far."""
        return time.perf_counter() - self._started_s, time.process_time() - self._cpu_s


@dataclass(frozen=True, slots=True)
class Pairs:
    """Rounds of the whole server and of its baseline, pair by pair; all did the same work."""

    whole: list[RolloutRound]
    baseline: list[RolloutRound]

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


async def one_round(feeder: Feeder, work: RolloutWork) -> RolloutRound:
    """Do the work once and check it. Raises EngineError if the round did other work."""
    done = await feeder(work)
    work.check(done.tokens)
    return done


TOLERANCE = 1e-4
"""Largest difference of losses (absolute) and of gradient norms (relative)."""


@dataclass(frozen=True, slots=True)
class BenchStep:
    """The result of one step of a contestant."""

    loss: float
    grad_norm: float
    efficiency: float
    """Tokens of sequences / positions computed."""


Contestant = Callable[[], BenchStep]
"""Makes one step over the batch, from the same weights as all contestants."""


@dataclass(slots=True)
class Timed:
    """The rounds of one contestant: seconds on the clock, CPU seconds; `done` is the last step."""

    seconds: list[float]
    cpu_s: list[float]
    """CPU seconds of all threads. On a busy machine they say more than the clock."""
    done: BenchStep


def in_turns(contestants: Mapping[str, Contestant], rounds: int, say: Callable[[str], None]) -> dict[str, Timed]:
    """Run all contestants `rounds` times, in alternating order; `say` gets the name of each when its turn is done.

    Raises TrainingError if their losses or gradient norms differ.
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
