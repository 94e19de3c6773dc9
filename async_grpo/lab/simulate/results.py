"""The figures of a simulated run, over the steps in which it was in its stride.

The first steps are left out, in which the window fills, and the last S ones, in which nothing is left to admit.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from async_grpo.lab.simulate.settings import SimulatedSettings
from async_grpo.lab.simulate.simulation import SimulatedRun
from async_grpo.lab.simulate.timings import Timings
from async_grpo.lab.simulate.trainer import SimulatedStep
from async_grpo.telemetry.bottleneck import describe_bottleneck
from async_grpo.telemetry.rows import mean

WARM_STEPS = 2
"""Steps beyond the first S + 1 that are left out."""
LEAST_STEPS, LEAST_GROUPS = 40, 320
"""Steps and groups that count, at least."""
MOST_SAMPLES = 30_000
"""Samples that count, at most: less than a second of simulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFigures:
    """What a simulation says about a run. Shares are 0 to 1, ages are in optimizer steps."""

    steps: int
    """Steps that the figures are of."""
    step_s: float
    tokens_per_s: float
    """Trained completion tokens a second."""
    samples_per_s: float
    groups_per_s: float
    """Groups inserted a second, trained or not."""
    generated_tokens_per_s: float
    trainer_idle: float
    rollout_idle: float
    age_mean: float
    """Mean age of the trained tokens."""
    age_max: int
    age_histogram: dict[int, float]
    """Age -> share of the trained tokens."""
    group_age: float
    """Mean age of the oldest token of a group."""
    before_queue: float
    """Versions between a group's admission and its insert, mean."""
    running: float
    """Samples that run at the end of a step, mean over the steps, all servers together."""
    ready: float
    """Groups that wait for the trainer at the end of a step, mean."""
    wasted: float
    """Share of the generated tokens that was not trained."""
    released: dict[str, int]
    evaluation_s: float | None
    """Mean seconds of an evaluation; None if none ended."""
    exchange_s: float
    """Mean seconds of an exchange with the buffer, its turn included; 0 if they cost nothing."""
    bottleneck: str


def figures_of(run: SimulatedRun) -> SimulatedFigures:
    """The figures of a simulated run."""
    rows = in_stride(run)
    spent_s = sum(row.step_s for row in rows)
    ages: Counter[int] = Counter()
    for row in rows:
        ages.update(row.ages)
    total = sum(ages.values())
    trainer_idle = sum(row.wait_s for row in rows) / spent_s
    rollout_idle = max(0.0, 1 - sum(row.busy_s for row in rows) / spent_s)
    count = len(rows)
    trained = sum(sum(row.ages.values()) for row in run.steps if not row.replayed)
    whole_s = run.ended_s
    return SimulatedFigures(
        steps=count,
        step_s=spent_s / count,
        tokens_per_s=sum(row.tokens for row in rows) / spent_s,
        samples_per_s=sum(row.samples for row in rows) / spent_s,
        groups_per_s=(rows[-1].inserted - rows[0].inserted) / (rows[-1].ended_s - rows[0].ended_s)
        if count > 1
        else run.inserted / whole_s,
        generated_tokens_per_s=run.generated_tokens / whole_s,
        trainer_idle=trainer_idle,
        rollout_idle=rollout_idle,
        age_mean=sum(age * tokens for age, tokens in ages.items()) / total if total else 0.0,
        age_max=max(ages, default=0),
        age_histogram={age: tokens / total for age, tokens in sorted(ages.items())},
        group_age=sum(row.group_ages for row in rows) / count,
        before_queue=sum(row.before_queue for row in rows) / count,
        running=sum(row.slots for row in rows) / count,
        ready=sum(row.ready for row in rows) / count,
        wasted=max(0.0, 1 - trained / run.generated_tokens) if run.generated_tokens else 0.0,
        released={reason: count for reason, count in run.released.items() if count},
        evaluation_s=mean([end - start for start, end in run.evaluations]),
        exchange_s=run.exchange_s,
        bottleneck=describe_bottleneck(trainer_idle, rollout_idle, selector=run.settings.policy.selector),
    )


def with_enough_steps(settings: SimulatedSettings, timings: Timings) -> SimulatedSettings:
    """The same run with the steps that its figures need, plus those that they leave out.

    The same number of steps counts for every S, in whole periods of evaluations and checkpoints, so that settings can
    be compared. With the run's own steps, a larger S leaves out more of them: it is then judged by other recorded
    lengths, and by three evaluations in 65 steps instead of three in 93.

    With max_staleness auto or faults the run's own steps are simulated, since what happens in them is rare.
    """
    faults = timings.faults
    if settings.auto is not None or faults.server_every_s or faults.trainer_every_s:
        return settings
    least = max(LEAST_STEPS, math.ceil(LEAST_GROUPS / settings.groups_per_step))
    most = max(least, MOST_SAMPLES // (settings.groups_per_step * settings.group_size))
    period = math.lcm(settings.eval_every or 1, settings.checkpoint_steps or 1)
    if period > most:
        period = settings.eval_every or 1
    if period > most:
        settings, period = replace(settings, eval_every=0), 1  # too rare to matter
    counted = min(most, max(least, settings.steps)) // period * period or period
    return settings.with_steps(counted + steps_aside(settings.max_staleness))


def steps_aside(max_staleness: int) -> int:
    """Steps at the start and the end of a run that figures leave out: the window fills, and empties."""
    return 2 * max_staleness + 1 + WARM_STEPS


def in_stride(run: SimulatedRun) -> list[SimulatedStep]:
    """The steps that count; all but the first if the run is too short for that."""
    head = run.settings.max_staleness + 1 + WARM_STEPS
    tail = run.settings.max_staleness
    rows = run.steps[head : len(run.steps) - tail]
    return rows if len(rows) >= 2 else run.steps[1:] or run.steps
