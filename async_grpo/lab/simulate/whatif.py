"""The simulated effect of single changes to a run: one more server, a larger S, faster weight updates, and so on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from async_grpo.lab.simulate.results import SimulatedMetrics, summarize_run, with_enough_steps
from async_grpo.lab.simulate.settings import SimulatedSettings
from async_grpo.lab.simulate.simulation import simulate
from async_grpo.lab.simulate.timings import Timings
from async_grpo.staleness import RateLimit
from async_grpo.telemetry.bottleneck import NOTEWORTHY


@dataclass(frozen=True, slots=True)
class Change:
    """One change to a run and its simulated effect."""

    label: str
    key: str
    """Configuration key with its new value, as typed. Empty for a change of the machine, which has no key."""
    metrics: SimulatedMetrics
    speedup: float
    """Tokens per second, divided by those without the change."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A change to simulate: settings or timings differ from those of the run."""

    label: str
    key: str
    settings: SimulatedSettings
    timings: Timings


def simulate_changes(
    settings: SimulatedSettings, timings: Timings, *, steps: int | None = None, seed: int = 1
) -> list[Change]:
    """Simulate every change that applies to the run, the largest speedup first.

    `steps`: number of steps to simulate. None: as many as the metrics need.
    """

    def simulate_metrics(settings: SimulatedSettings, timings: Timings) -> SimulatedMetrics:
        settings = with_enough_steps(settings, timings) if steps is None else settings.with_steps(steps)
        return summarize_run(simulate(settings, timings, seed=seed))

    present = simulate_metrics(settings, timings)
    changes: list[Change] = []
    for candidate in _candidates(settings, timings):
        metrics = simulate_metrics(candidate.settings, candidate.timings)
        speedup = metrics.tokens_per_s / present.tokens_per_s
        changes.append(Change(candidate.label, candidate.key, metrics, speedup))
    return sorted(changes, key=lambda change: -change.speedup)


def with_staleness(settings: SimulatedSettings, max_staleness: int) -> SimulatedSettings:
    """Copy with another S."""
    policy = settings.policy
    window = replace(policy.window, max_staleness=max_staleness, staleness=None)
    return replace(settings, policy=replace(policy, window=window), auto_staleness=None)


def with_groups_per_step(settings: SimulatedSettings, groups_per_step: int) -> SimulatedSettings:
    """Copy with another P and as many steps. The selector's window shrinks if it no longer fits."""
    policy = settings.policy
    window = replace(policy.window, groups_per_step=groups_per_step, horizon=settings.steps * groups_per_step)
    selector_window = min(policy.selector_window, window.capacity)
    return replace(settings, policy=replace(policy, window=window, selector_window=selector_window))


def _candidates(settings: SimulatedSettings, timings: Timings) -> Iterator[_Candidate]:
    """Yield the changes that apply to the run. Equal speedups keep this order."""

    def change_setting(label: str, key: str, value: int, changed: SimulatedSettings) -> _Candidate:
        return _Candidate(label, f"{key}={value}", changed, timings)

    def change_timings(label: str, changed: Timings, key: str = "") -> _Candidate:
        return _Candidate(label, key, settings, changed)

    servers = settings.servers + 1
    yield change_setting("one more server", "rollout.servers", servers, replace(settings, servers=servers))

    staleness = max(1, 2 * settings.max_staleness)
    yield change_setting("twice the staleness", "max_staleness", staleness, with_staleness(settings, staleness))

    # A rate limit depends on P, so it would be another limit with half of it.
    if settings.groups_per_step > 1 and settings.policy.rate == RateLimit():
        groups = settings.groups_per_step // 2
        yield change_setting("smaller steps", "groups_per_step", groups, with_groups_per_step(settings, groups))

    slots = max(settings.max_concurrency + 1, settings.max_concurrency * 3 // 2)
    yield change_setting("more slots", "rollout.max_concurrency", slots, replace(settings, max_concurrency=slots))

    yield change_timings("a trainer twice as fast", _halve(timings, "trainer", "base_s", "token_s", "part_s"))
    yield change_timings("engines twice as fast", _halve(timings, "engine", "step_s", "request_s", "context_s"))
    yield change_timings("weights in half the time", _halve(timings, "sync", "stall_s", "transfer_s", "load_s"))
    yield change_timings("verifiers in half the time", _halve(timings, "verifier", "sample_s", "latency_s"))

    if settings.checkpoint_steps and timings.trainer.checkpoint_s:
        every_steps = 2 * settings.checkpoint_steps
        rarer = replace(settings, checkpoint_steps=every_steps)
        yield change_setting("half as many checkpoints", "trainer.checkpoint.every_steps", every_steps, rarer)

    if settings.eval_every:
        every_steps = 2 * settings.eval_every
        rarer = replace(settings, eval_every=every_steps)
        yield change_setting("half as many evaluations", "eval.every_steps", every_steps, rarer)

    if timings.task_s:
        yield change_timings("tasks in half the time", timings.model_copy(update={"task_s": timings.task_s / 2}))
    if timings.slow_servers:
        yield change_timings("no server slower than the others", timings.model_copy(update={"slow_servers": []}))
    if max(timings.engine_contended, timings.trainer_contended) >= NOTEWORTHY:
        yield change_timings("processors of their own", _without_contention(timings), key="launch.cores")


def _without_contention(timings: Timings) -> Timings:
    """Timings without the time that both sides spent waiting for processors."""
    return timings.model_copy(
        update={
            "engine": timings.engine.slowed_by(1 - timings.engine_contended),
            "trainer": timings.trainer.slowed_by(1 - timings.trainer_contended),
        }
    )


def _halve(timings: Timings, section: str, *keys: str) -> Timings:
    """Timings with these keys of a section halved."""
    part = getattr(timings, section)
    halved = part.model_copy(update={key: getattr(part, key) / 2 for key in keys})
    return timings.model_copy(update={section: halved})
