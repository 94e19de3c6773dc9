"""Metrics of a simulated run, over its steady-state steps.

The first steps, while the window fills, are left out, and so are the last S, when nothing is left to admit.
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

WARM_UP_STEPS = 2
"""Steps after the first S + 1 that are left out, too."""
MIN_STEPS = 40
"""Minimum number of steady-state steps to simulate."""
MIN_GROUPS = 320
"""Minimum number of groups in them."""
MAX_SAMPLES = 30_000
"""Maximum number of samples in them: less than a second of computing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMetrics:
    """Metrics of a simulated run. Fractions are 0 to 1, ages are in optimizer steps. The field names are keys of
    `simulate --json`."""

    steps: int
    """Number of steady-state steps."""
    step_s: float
    tokens_per_s: float
    """Trained completion tokens per second."""
    samples_per_s: float
    groups_per_s: float
    """Groups inserted per second, trained or not."""
    generated_tokens_per_s: float
    trainer_idle: float
    rollout_idle: float
    age_mean: float
    """Mean age of the trained tokens."""
    age_max: int
    age_histogram: dict[int, float]
    """Age -> fraction of the trained tokens."""
    group_age: float
    """Mean age of a group's oldest token."""
    before_queue: float
    """Mean number of versions between a group's admission and its insert."""
    running: float
    """Samples running at the end of a step over all servers, mean over the steps."""
    ready: float
    """READY groups at the end of a step, mean over the steps."""
    wasted: float
    """Fraction of the generated tokens that was not trained."""
    released: dict[str, int]
    evaluation_s: float | None
    """Mean seconds of an evaluation; None if none ended."""
    exchange_s: float
    """Mean seconds of an exchange with the buffer, including its wait for earlier ones; 0 if exchanges cost nothing."""
    bottleneck: str


def summarize_run(run: SimulatedRun) -> SimulatedMetrics:
    """Compute the metrics of a simulated run."""
    rows = select_steady_steps(run)
    count = len(rows)
    steady_s = sum(row.step_s for row in rows)

    ages: Counter[int] = Counter()
    for row in rows:
        ages.update(row.ages)
    aged_tokens = sum(ages.values())

    if count > 1:
        groups_per_s = (rows[-1].inserted - rows[0].inserted) / (rows[-1].ended_s - rows[0].ended_s)
    else:
        groups_per_s = run.inserted / run.ended_s

    wasted = 0.0
    if run.generated_tokens:
        trained_tokens = sum(sum(row.ages.values()) for row in run.steps if not row.replayed)
        wasted = max(0.0, 1 - trained_tokens / run.generated_tokens)

    trainer_idle = sum(row.wait_s for row in rows) / steady_s
    rollout_idle = max(0.0, 1 - sum(row.busy_s for row in rows) / steady_s)
    return SimulatedMetrics(
        steps=count,
        step_s=steady_s / count,
        tokens_per_s=sum(row.tokens for row in rows) / steady_s,
        samples_per_s=sum(row.samples for row in rows) / steady_s,
        groups_per_s=groups_per_s,
        generated_tokens_per_s=run.generated_tokens / run.ended_s,
        trainer_idle=trainer_idle,
        rollout_idle=rollout_idle,
        age_mean=sum(age * tokens for age, tokens in ages.items()) / aged_tokens if aged_tokens else 0.0,
        age_max=max(ages, default=0),
        age_histogram={age: tokens / aged_tokens for age, tokens in sorted(ages.items())},
        group_age=sum(row.group_ages for row in rows) / count,
        before_queue=sum(row.before_queue for row in rows) / count,
        running=sum(row.slots for row in rows) / count,
        ready=sum(row.ready for row in rows) / count,
        wasted=wasted,
        released={reason: groups for reason, groups in run.released.items() if groups},
        evaluation_s=mean([end - start for start, end in run.evaluations]),
        exchange_s=run.exchange_s,
        bottleneck=describe_bottleneck(trainer_idle, rollout_idle, selector=run.settings.policy.selector),
    )


def with_enough_steps(settings: SimulatedSettings, timings: Timings) -> SimulatedSettings:
    """Copy with as many steps as the metrics need, plus those that they leave out.

    The number of steady-state steps is the same for every S, in whole periods of evaluations and checkpoints, so that
    settings can be compared. With the run's own number of steps, a larger S would leave out more of them: it would be
    judged by other recorded lengths, and by three evaluations in 65 steps instead of three in 93.

    With max_staleness auto or faults the run's own steps are simulated, because their events are rare.
    """
    faults = timings.faults
    if settings.auto_staleness is not None or faults.server_every_s or faults.trainer_every_s:
        return settings

    min_steps = max(MIN_STEPS, math.ceil(MIN_GROUPS / settings.groups_per_step))
    max_steps = max(min_steps, MAX_SAMPLES // (settings.groups_per_step * settings.group_size))

    period = math.lcm(settings.eval_every or 1, settings.checkpoint_steps or 1)
    if period > max_steps:
        period = settings.eval_every or 1
    if period > max_steps:
        # Evaluations are too rare to matter.
        settings = replace(settings, eval_every=0)
        period = 1

    wanted_steps = min(max_steps, max(min_steps, settings.steps))
    whole_periods = wanted_steps // period * period or period
    return settings.with_steps(whole_periods + transient_steps(settings.max_staleness))


def transient_steps(max_staleness: int) -> int:
    """Number of steps outside the steady state: the window fills at the start and empties at the end."""
    return 2 * max_staleness + 1 + WARM_UP_STEPS


def select_steady_steps(run: SimulatedRun) -> list[SimulatedStep]:
    """Steps in the steady state; all except the first if the run is too short for that."""
    first = run.settings.max_staleness + 1 + WARM_UP_STEPS
    rows = run.steps[first : len(run.steps) - run.settings.max_staleness]
    if len(rows) >= 2:
        return rows
    return run.steps[1:] or run.steps
