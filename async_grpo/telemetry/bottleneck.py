"""Who waits in a run, and what to change: the rules and the only thresholds of everything that answers this.

    idle shares of both sides       --> find_bottleneck, describe_bottleneck     report, page of runs, simulate

A side that waits for more than a tenth of the time waits, whoever asks:

    share of time waiting     servers <= 10%     servers > 10%
    trainer <= 10%            balanced           training
    trainer >  10%            generation         turns

Everything here is a pure function of numbers that others measure (`telemetry.idle`).
"""

from __future__ import annotations

from enum import StrEnum

from async_grpo.staleness import Selector

WAITS = 0.10
"""Share of the time above which a side counts as waiting. Equal runs on shared machines differ by as much, so a shorter
wait is no reason to change a run."""
NOTEWORTHY = 0.05
"""Share of the time from which a disturbance (evaluations, missing processors) is mentioned."""


class Bottleneck(StrEnum):
    """What the idle shares of both sides say."""

    GENERATION = "generation"
    TRAINING = "training"
    TURNS = "turns"
    """Each side waits for the other, so that they hardly overlap."""
    BALANCED = "balanced"


def find_bottleneck(trainer_idle: float, rollout_idle: float) -> Bottleneck:
    """The bottleneck by the shares of the time (0 to 1) in which the trainer waited for groups, and in which the
    rollout servers generated nothing."""
    if trainer_idle > WAITS:
        return Bottleneck.TURNS if rollout_idle > WAITS else Bottleneck.GENERATION
    return Bottleneck.TRAINING if rollout_idle > WAITS else Bottleneck.BALANCED


def describe_bottleneck(
    trainer_idle: float | None,
    rollout_idle: float | None,
    evaluating: float | None = None,
    *,
    selector: Selector = "fifo",
    disturbed: int = 0,
) -> str:
    """A sentence with the idle shares and what follows from them; "" if the trainer's is not known.

    All shares are of the trainer's time, 0 to 1. `evaluating`: the share in which servers evaluated. `disturbed`:
    number of steps that are not in the shares, because a server was started again.
    """
    if trainer_idle is None:
        return ""
    waited = f"The trainer waited for rollouts {trainer_idle:.0%} of its time"
    if rollout_idle is None:
        return f"{waited}; how long the rollout servers waited is not known."
    tested = ""
    if evaluating is not None and evaluating >= NOTEWORTHY:
        tested = f" Evaluations kept the servers busy for {evaluating:.0%} of it."
    without = ""
    if disturbed:
        steps = "1 step" if disturbed == 1 else f"{disturbed} steps"
        without = f" This is without {steps} in which a rollout server was started again."
    reading = _reading(trainer_idle, rollout_idle, selector)
    verdict = f"{waited}, and the rollout servers generated nothing for {rollout_idle:.0%} of it: {reading}."
    return f"{verdict}{tested}{without}"


def _reading(trainer_idle: float, rollout_idle: float, selector: Selector) -> str:
    match find_bottleneck(trainer_idle, rollout_idle):
        case Bottleneck.GENERATION:
            return "generation was the bottleneck, and more rollout servers would make the run faster"
        case Bottleneck.TRAINING:
            return "training was the bottleneck, and a faster trainer would make the run faster"
        case Bottleneck.BALANCED:
            return "generation and training were balanced"
        case Bottleneck.TURNS if selector == "exact_age":
            return "the two sides took turns, as they must with the selector exact_age"
    longer = ""
    if abs(trainer_idle - rollout_idle) > WAITS:
        longer = f"; {'generation' if trainer_idle > rollout_idle else 'training'} took longer"
    return f"the two sides took turns, and a larger max_staleness would let them work at the same time{longer}"
