"""Rounds of several contestants in turn, so that what slows the machine down for a while slows down all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from async_grpo.errors import TrainingError

TOLERANCE = 1e-4
"""Of losses, absolute, and of gradient norms, relative."""


@dataclass(frozen=True, slots=True)
class Done:
    """What a step of a contestant came to."""

    loss: float
    grad_norm: float
    efficiency: float
    """Tokens of sequences / positions computed."""


Contestant = Callable[[], Done]
"""Makes one step over the batch, from the same weights as everybody."""


@dataclass(slots=True)
class Timed:
    """Rounds of one contestant: seconds on the clock, seconds of processor time; `done` is of the last."""

    seconds: list[float]
    cpu_s: list[float]
    """Of all threads. On a busy machine it says more than the clock."""
    done: Done


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
