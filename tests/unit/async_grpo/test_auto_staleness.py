"""max_staleness: auto. The controller, by itself and in the loop of a simulated run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

from async_grpo.auto_staleness import StalenessController, StalenessDecision, StalenessFigures
from async_grpo.config.buffer import AutoStalenessConfig
from async_grpo.lab.simulate.lengths import LengthModel
from async_grpo.lab.simulate.settings import SimulatedSettings
from async_grpo.lab.simulate.simulation import Simulation
from async_grpo.lab.simulate.timings import EngineTimings, Timings, TrainerTimings
from async_grpo.lab.simulate.trainer import SimulatedStep
from async_grpo.staleness import ReplayPolicy, StalenessWindow
from async_grpo.telemetry.bottleneck import Bottleneck, find_bottleneck

P = 4
QUIET = StalenessFigures(idle=0.05, tokens_per_s=100.0, active=0, ready=P)


def controller(staleness: int = 2, *, smallest: int = 0, **config: object) -> StalenessController:
    chosen = AutoStalenessConfig.model_validate({"start": staleness, **config})
    return StalenessController(chosen, groups_per_step=P, smallest=smallest, staleness=staleness)


def full(staleness: int) -> int:
    """Number of groups in a full window after the release of the step's own."""
    return staleness * P


def feed(
    subject: StalenessController, steps: int, make: Callable[[int], StalenessFigures]
) -> list[tuple[int, int, StalenessDecision]]:
    """Feed `steps` steps, whose figures depend on S. Returns step, S before and decision, per decision."""
    decisions = []
    for step in range(steps):
        before = subject.staleness
        if decision := subject.observe_step(make(before)):
            decisions.append((step, before, decision))
    return decisions


def test_staleness_doubles_if_the_trainer_waits_and_the_window_is_full() -> None:
    subject = controller(1, max=6, patience=3)
    decisions = feed(subject, 14, lambda s: replace(QUIET, idle=0.4, active=full(s), tokens_per_s=50.0 * (s + 1)))
    assert [(step, before, d.staleness) for step, before, d in decisions] == [(2, 1, 2), (7, 2, 4), (12, 4, 6)]
    assert "waits 40% of its time" in decisions[0][2].reason


def test_staleness_falls_if_the_servers_are_the_limit() -> None:
    subject = controller(3, patience=2)
    decisions = feed(subject, 30, lambda s: replace(QUIET, idle=0.6, active=min(full(s), P)))
    assert [d.staleness for _, _, d in decisions] == [2]
    assert "room for 8 groups that did not come" in decisions[0][2].reason


def test_staleness_falls_until_one_batch_is_ready() -> None:
    subject = controller(8, patience=2)
    decisions = feed(subject, 60, lambda s: replace(QUIET, idle=0.0, active=full(s), ready=full(s)))
    assert [d.staleness for _, _, d in decisions] == [4, 2, 1]
    assert "7 more batches are ready" in decisions[0][2].reason


def test_a_useless_increase_is_reverted_and_paused_until_the_speed_changes() -> None:
    subject = controller(2, max=4, patience=2)
    waiting = replace(QUIET, idle=0.3)
    decisions = feed(subject, 25, lambda s: replace(waiting, active=full(s)))
    assert [(before, d.staleness) for _, before, d in decisions] == [(2, 4), (4, 2)]
    assert "changed by +0%" in decisions[1][2].reason
    slower = replace(waiting, tokens_per_s=20.0)
    assert feed(subject, 6, lambda s: replace(slower, active=full(s)))[0][2].staleness == 4


@pytest.mark.parametrize(("gain", "kept"), [(0.04, False), (0.06, True)])
def test_an_increase_stays_for_a_gain_that_tune_would_choose(gain: float, kept: bool) -> None:
    subject = controller(2, max=4, patience=2)
    speed = {2: 100.0, 4: 100.0 * (1 + gain)}
    decisions = feed(subject, 12, lambda s: replace(QUIET, idle=0.3, active=full(s), tokens_per_s=speed[s]))
    assert [d.staleness for _, _, d in decisions] == ([4] if kept else [4, 2])


@pytest.mark.parametrize("idle", [0.05, 0.09, 0.11, 0.3])
@pytest.mark.parametrize("rollout_idle", [0.0, 0.2])
def test_staleness_rises_only_if_the_report_does_not_name_the_trainer(idle: float, rollout_idle: float) -> None:
    waits = find_bottleneck(idle, rollout_idle) in (Bottleneck.GENERATION, Bottleneck.TURNS)
    decisions = feed(controller(1, patience=2), 2, lambda s: replace(QUIET, idle=idle, active=full(s)))
    assert bool(decisions) == waits


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        (replace(QUIET, ess=0.3), "effective sample size is 0.30 (limit 0.5)"),
        (replace(QUIET, clip_fraction=0.4), "40% of the tokens are clipped (limit 30%)"),
    ],
)
def test_staleness_falls_if_tokens_are_too_old(figures: StalenessFigures, says: str) -> None:
    subject = controller(2, patience=3)
    ((step, before, decision),) = feed(subject, 4, lambda s: replace(figures, idle=0.5, active=full(s)))
    assert (step, before, decision.staleness) == (2, 2, 1)
    assert says in decision.reason


def test_staleness_does_not_rise_near_the_quality_limits() -> None:
    near = replace(QUIET, idle=0.5, ess=0.52)
    assert feed(controller(1), 20, lambda s: replace(near, active=full(s))) == []


def test_staleness_stays_within_its_bounds() -> None:
    draw = random.Random(3)
    subject = controller(2, min=0, max=5, patience=1, smallest=1)
    seen = set()
    for _ in range(2000):
        idle, ess = draw.choice([0.0, 0.5]), draw.choice([0.2, 0.9])
        active, ready = draw.randrange(5 * P), draw.randrange(5 * P)
        subject.observe_step(StalenessFigures(idle, draw.uniform(10, 100), active, ready, ess))
        seen.add(subject.staleness)
    assert seen == {1, 2, 3, 4, 5}


def test_a_wrong_decrease_is_repeated_more_and_more_rarely() -> None:
    subject = controller(3, max=3, patience=2)

    def step(s: int) -> StalenessFigures:
        enough = s == 3
        return StalenessFigures(0.0 if enough else 0.4, 100.0 if enough else 50.0, full(s), full(3) if enough else 0)

    falls = [at for at, before, _ in feed(subject, 400, step) if before == 3]
    waits = [later - earlier for earlier, later in pairwise(falls)]
    assert waits == sorted(waits) and waits[-1] > 2 * waits[0]


@dataclass(slots=True)
class SlowSide:
    """A simulated run in which one side becomes five times as slow."""

    staleness: int | None
    """None: auto."""
    side: str
    steps: int = 110
    slow_from: int = 50

    def tokens_per_s(self) -> tuple[float, int]:
        """Speed from 20 steps after the change on, and the largest age of all."""
        auto = AutoStalenessConfig() if self.staleness is None else None
        window = StalenessWindow(8 if self.staleness is None else self.staleness, P, self.steps * P)
        policy = ReplayPolicy(window)
        settings = SimulatedSettings(
            policy=policy.with_staleness(1) if auto else policy,
            steps=self.steps,
            group_size=8,
            servers=1,
            max_concurrency=128,
            auto_staleness=auto,
        )
        timings = Timings(
            prompt_tokens=64,
            lengths=LengthModel(kind="lognormal", mean=120, sigma=0.7, cap=512),
            engine=EngineTimings(step_s=0.004, request_s=0.00006),
            trainer=TrainerTimings(base_s=0.6, token_s=1e-5, variation=0.1),
        )
        steps = SlowedSimulation(settings, timings, self).run().steps
        counted = steps[self.slow_from + 20 : -8]
        speed = sum(step.tokens for step in counted) / sum(step.step_s for step in counted)
        return speed, max(age for step in steps for age in step.ages)


class SlowedSimulation(Simulation):
    """Such a run: one side becomes slow when its version is published."""

    def __init__(self, settings: SimulatedSettings, timings: Timings, slow: SlowSide) -> None:
        super().__init__(settings, timings, seed=1)
        publish = self.trainer.publish_version

        def slow_down_and_publish(version: int) -> None:
            if version == slow.slow_from and slow.side == "trainer":
                slower = timings.trainer.model_copy(update={"base_s": 3.0, "token_s": 5e-5})
                self.trainer._timings = slower
            elif version == slow.slow_from:
                for server in self.servers:
                    server.set_slowdown(5.0)
            publish(version)

        self.trainer.publish_version = slow_down_and_publish


@pytest.mark.parametrize("side", ["trainer", "server"])
def test_after_a_side_became_five_times_as_slow_it_is_within_10_percent_of_the_best_fixed_s(side: str) -> None:
    best = max(SlowSide(staleness, side).tokens_per_s()[0] for staleness in (0, 1, 2, 4, 8))
    speed, oldest = SlowSide(None, side).tokens_per_s()
    assert speed > 0.9 * best
    assert oldest <= 8


def test_a_simulated_run_says_what_was_decided_and_keeps_books() -> None:
    steps: list[SimulatedStep]
    run = SlowedSimulation(
        SimulatedSettings(
            policy=ReplayPolicy(StalenessWindow(8, P, 60 * P)).with_staleness(0),
            steps=60,
            group_size=8,
            servers=1,
            max_concurrency=128,
            auto_staleness=AutoStalenessConfig(start=0),
        ),
        Timings(lengths=LengthModel(mean=120), trainer=TrainerTimings(base_s=0.6)),
        SlowSide(None, "none"),
    ).run()
    steps = run.steps
    assert run.decisions and run.decisions[0][1].before == 0
    version, decision = run.decisions[0]
    assert {step.staleness for step in steps[:version]} == {0}
    assert steps[version].staleness == decision.staleness
    assert run.admitted == sum(run.released.values()) == 60 * P
