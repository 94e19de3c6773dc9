"""How many servers a run can use: the formula, and what is learned from rows and heartbeats."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from async_grpo.staleness import ReplayPolicy, StalenessWindow
from async_grpo.telemetry.bottleneck import WORTHWHILE
from async_grpo.telemetry.servers_wanted import (
    BLOCK_BEATS,
    Rates,
    ServerDemand,
    StepWork,
    fit_token_times,
    generation_lag,
    servers_wanted,
    step_period,
)
from async_grpo.wire.board import ServerBeat


def rates(*, lag: int = 4, compute_s: float = 1.0, longest: float = 500, load_s: float = 0.0) -> Rates:
    """64 samples of 400 tokens, 10 ms each, 32 at once: 8 s a step on one server that is always full."""
    steps = [StepWork(compute_s, 64 * 400, longest)] * 8
    return Rates(token_s=0.01, load_s=load_s, slots=32, samples=64, window=64 * (lag + 1), lag=lag, steps=steps)


@pytest.mark.parametrize(
    ("given", "wanted", "period_s"),
    [
        (rates(compute_s=10), 1, 10.0),  # the trainer is the bottleneck
        (rates(compute_s=2), 4, 2.0),  # four servers make a batch in 2 s
        (rates(lag=0), 2, 6.0),  # S = 0: two servers take all 64 samples, and a third gets none
        (rates(lag=0, longest=4000), 1, 41.0),  # the longest completion takes 40 s on any server
        (rates(compute_s=0.01), 8, 5.01 / 5),  # the window of 5 batches is as long as the longest completion
    ],
    ids=["trainer-bound", "rollout-bound", "window-bound", "long tail", "window-bound later"],
)
def test_wanted_is_what_feeds_the_trainer_and_what_the_window_lets_work(
    given: Rates, wanted: int, period_s: float
) -> None:
    found = servers_wanted(given)
    assert step_period(given, 64) == pytest.approx(period_s, rel=0.01)
    assert found in (wanted, wanted + 1)
    assert step_period(given, found) <= (1 + WORTHWHILE) * step_period(given, 64)
    assert found == 1 or step_period(given, found - 1) > (1 + WORTHWHILE) * step_period(given, 64)


def test_no_more_than_the_most_are_wanted_and_more_servers_never_slow_a_run_down() -> None:
    given = rates(compute_s=0.01, load_s=0.001)
    assert servers_wanted(given, most=3) == 3
    periods = [step_period(given, servers) for servers in range(1, 20)]
    assert all(more <= fewer * 1.00001 for fewer, more in pairwise(periods))


def test_a_trainer_that_streams_hides_its_work_behind_the_generation() -> None:
    given = rates(lag=0, compute_s=3)
    assert step_period(replace(given, streaming=True), 2) == pytest.approx(step_period(given, 2) - 3, rel=0.01)


@pytest.mark.parametrize(
    ("policy", "lag"),
    [
        ({"max_staleness": 2}, 2),
        ({"max_staleness": 2, "selector": "exact_age"}, 0),
        ({"max_staleness": 2, "selector": "windowed_fifo", "selector_window": 9}, 3),
    ],
    ids=["fifo", "exact_age", "windowed_fifo"],
)
def test_the_lag_follows_the_window_and_the_selector(policy: dict[str, Any], lag: int) -> None:
    window = StalenessWindow(policy.pop("max_staleness"), 8, 80)
    assert generation_lag(ReplayPolicy(window, **policy)) == lag


def test_speeds_that_a_load_cannot_explain_do_not_depend_on_it() -> None:
    assert fit_token_times([(4, 0.02), (8, 0.01)]) == (0.015, 0.0)
    assert fit_token_times([(4, 0.01), (8, 0.03)]) == (0.0, pytest.approx(0.02 / 6))
    assert fit_token_times([(8, 0.02), (8, 0.02)]) == (0.01, 0.00125)  # told by another number of servers


def beat(time_s: float, running: int) -> ServerBeat:
    rate = running / (0.01 + 0.001 * running)
    return ServerBeat(name="rollout-0", pid=1, version=0, running=running, tokens_per_s=rate, time_s=time_s)


def demand() -> ServerDemand:
    return ServerDemand(ReplayPolicy(StalenessWindow(1, 8, 800)), started_samples=8, slots=16, streaming=False)


def test_speeds_are_learned_from_heartbeats_and_the_work_from_rows() -> None:
    learned = demand()
    for second in range(24 * BLOCK_BEATS):
        for _ in range(2):  # a heartbeat that is read twice counts once
            learned.add_heartbeats([beat(float(second), 4 + 4 * (second // (4 * BLOCK_BEATS) % 3))])
    row = {"step_s": 5.0, "wait_s": 4.0, "completion_tokens_mean": 100.0, "completion_tokens_max": 180, "staleness": 0}
    assert learned.estimate_servers() is None  # no step is known
    for step in range(3):
        learned.add_step(row | {"step": step})
    learned.add_step(row | {"replayed": True, "step_s": 500.0})
    learned.add_step({"step_s": 1.0, "wait_s": 0.5})  # a step without a batch
    found = learned.rates()
    assert found is not None
    assert (found.token_s, found.load_s) == (pytest.approx(0.01, rel=0.2), pytest.approx(0.001, rel=0.2))
    assert found.steps == [StepWork(1.0, 6400.0, 180)] * 3
    assert found.lag == 0  # effective S
    assert learned.estimate_servers(most=2) == 2


def test_servers_that_do_nothing_say_nothing() -> None:
    learned = demand()
    for second in range(40):
        learned.add_heartbeats([beat(float(second), 8 if second % 8 == 0 else 0)])  # bursts shorter than a heartbeat
    row = {"step_s": 5.0, "wait_s": 4.0, "completion_tokens_mean": 100.0, "completion_tokens_max": 180}
    for _ in range(5):
        learned.add_step(row)
    assert learned.rates() is None
