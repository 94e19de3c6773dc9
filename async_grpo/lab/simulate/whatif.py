"""What one change would give: the same run, simulated with one more server, a larger S, faster weights, and so on."""

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
    """One change to a run and what comes of it."""

    label: str
    key: str
    """The configuration key, with its new value; "" for a change of the machine."""
    figures: SimulatedMetrics
    speedup: float
    """Tokens a second over those without the change."""


def changes(settings: SimulatedSettings, timings: Timings, *, steps: int | None = None, seed: int = 1) -> list[Change]:
    """Every change of `_candidates` simulated, the best first; over as many steps as their figures need, or `steps`."""

    def figures_with(settings: SimulatedSettings, timings: Timings) -> SimulatedMetrics:
        settings = with_enough_steps(settings, timings) if steps is None else settings.with_steps(steps)
        return summarize_run(simulate(settings, timings, seed=seed))

    now = figures_with(settings, timings)
    found = []
    for label, key, changed, faster in _candidates(settings, timings):
        figures = figures_with(changed, faster)
        found.append(Change(label, key, figures, figures.tokens_per_s / now.tokens_per_s))
    return sorted(found, key=lambda change: -change.speedup)


def with_staleness(settings: SimulatedSettings, max_staleness: int) -> SimulatedSettings:
    """The same run with another S."""
    policy = settings.policy
    window = replace(policy.window, max_staleness=max_staleness, staleness=None)
    return replace(settings, policy=replace(policy, window=window), auto_staleness=None)


def with_groups(settings: SimulatedSettings, groups_per_step: int) -> SimulatedSettings:
    """The same run with another P, and as many steps. A window of the selector that no longer fits is made smaller."""
    policy = settings.policy
    window = replace(policy.window, groups_per_step=groups_per_step, horizon=settings.steps * groups_per_step)
    chosen = min(policy.selector_window, window.capacity)
    return replace(settings, policy=replace(policy, window=window, selector_window=chosen))


def _candidates(settings: SimulatedSettings, timings: Timings) -> Iterator[tuple[str, str, SimulatedSettings, Timings]]:
    further = max(1, 2 * settings.max_staleness)
    yield "one more server", f"rollout.servers={settings.servers + 1}", _more_servers(settings), timings
    yield "twice the staleness", f"max_staleness={further}", with_staleness(settings, further), timings
    if settings.groups_per_step > 1 and settings.policy.rate == RateLimit():  # a limit of the rate counts on P
        smaller = settings.groups_per_step // 2
        yield "smaller steps", f"groups_per_step={smaller}", with_groups(settings, smaller), timings
    slots = max(settings.max_concurrency + 1, settings.max_concurrency * 3 // 2)
    more = replace(settings, max_concurrency=slots)
    yield "more slots", f"rollout.max_concurrency={slots}", more, timings
    yield "a trainer twice as fast", "", settings, _faster(timings, "trainer", "base_s", "token_s", "part_s")
    yield "engines twice as fast", "", settings, _faster(timings, "engine", "step_s", "request_s", "context_s")
    yield "weights in half the time", "", settings, _faster(timings, "sync", "stall_s", "transfer_s", "load_s")
    yield "verifiers in half the time", "", settings, _faster(timings, "verifier", "sample_s", "latency_s")
    if settings.checkpoint_steps and timings.trainer.checkpoint_s:
        rarer = 2 * settings.checkpoint_steps
        key = f"trainer.checkpoint.every_steps={rarer}"
        yield "half as many checkpoints", key, replace(settings, checkpoint_steps=rarer), timings
    if settings.eval_every:
        rarer = 2 * settings.eval_every
        yield "half as many evaluations", f"eval.every_steps={rarer}", replace(settings, eval_every=rarer), timings
    if timings.task_s:
        yield "tasks in half the time", "", settings, timings.model_copy(update={"task_s": timings.task_s / 2})
    if timings.slow_servers:
        yield "no server slower than the others", "", settings, timings.model_copy(update={"slow_servers": []})
    if max(timings.engine_contended, timings.trainer_contended) >= NOTEWORTHY:
        yield "processors of their own", "launch.cores", settings, _uncontended(timings)


def _more_servers(settings: SimulatedSettings) -> SimulatedSettings:
    return replace(settings, servers=settings.servers + 1)


def _uncontended(timings: Timings) -> Timings:
    """The timings without what both sides waited for processors."""
    engine = timings.engine.slowed_by(1 - timings.engine_contended)
    less = {key: getattr(timings.trainer, key) * (1 - timings.trainer_contended) for key in ("base_s", "token_s")}
    return timings.model_copy(update={"engine": engine, "trainer": timings.trainer.model_copy(update=less)})


def _faster(timings: Timings, section: str, *keys: str) -> Timings:
    """The timings with these keys of a section halved."""
    part = getattr(timings, section)
    halved = part.model_copy(update={key: getattr(part, key) / 2 for key in keys})
    return timings.model_copy(update={section: halved})
