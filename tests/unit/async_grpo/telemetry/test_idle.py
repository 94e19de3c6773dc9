"""Throughput, and idle shares, counted by hand."""

from __future__ import annotations

import pytest

from async_grpo.telemetry.idle import (
    evaluating_share,
    merged,
    outages,
    overlap,
    rollout_idle_s,
    rollout_idle_share,
    trainer_idle_share,
    undisturbed_steps,
)
from async_grpo.telemetry.rows import Row, steady_steps, tokens_per_s

STEPS: list[Row] = [  # the trainer was away from 20 to 1000
    {"step": 1, "time_s": 20.0, "step_s": 10.0, "wait_s": 2.0, "trained_tokens": 300},
    {"step": 2, "time_s": 1010.0, "step_s": 10.0, "wait_s": 3.0, "trained_tokens": 100},
]


def span(start_s: float, end_s: float, track: str = "generation") -> Row:
    return {"track": track, "start_s": start_s, "end_s": end_s}


FIRST = [span(0, 13), span(12, 15), span(500, 600)]
SECOND = [span(10, 20, "wait"), span(1000, 1010, "evaluation")]


def test_tokens_per_second_are_all_tokens_over_all_time_and_not_a_mean_of_rates() -> None:
    assert tokens_per_s(STEPS) == 400 / 20
    assert tokens_per_s([*STEPS, {"step": 3, "step_s": 5.0}]) == 400 / 25, "a step that was skipped takes time"
    assert tokens_per_s([{"step": 3, "step_s": 5.0}]) is None
    assert tokens_per_s([]) is None


def test_the_first_window_or_half_of_a_short_run_is_its_head_start() -> None:
    rows: list[Row] = [{"step": step} for step in range(1, 11)]
    assert steady_steps(rows, max_staleness=2) == rows[3:]
    assert steady_steps(rows[:4], max_staleness=8) == rows[2:4]
    assert steady_steps([], max_staleness=0) == []


def test_a_server_is_idle_when_it_generates_nothing_while_the_trainer_is_at_work() -> None:
    assert rollout_idle_s(STEPS, [FIRST]) == [5.0, 10.0]
    assert rollout_idle_share(STEPS, [FIRST]) == 0.75
    assert rollout_idle_share(STEPS, [FIRST, SECOND]) == pytest.approx((0.75 + 0.5) / 2)
    assert rollout_idle_share([], [FIRST]) is None and rollout_idle_share(STEPS, []) is None
    assert evaluating_share(STEPS, [FIRST, SECOND]) == 0.5
    assert trainer_idle_share(STEPS) == 5 / 20 and trainer_idle_share([]) is None


def test_spans_are_merged_and_overlapped() -> None:
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4), (9, 9)]) == [(0, 4), (5, 6)]
    assert overlap([(0, 4), (5, 6)], [(1, 2), (3, 5.5)]) == [(1, 2), (3, 4), (5, 5.5)]


def started(at_s: float) -> Row:
    return {"track": "process", "name": "started", "start_s": at_s}


def test_a_server_is_away_from_its_last_word_until_it_generates_again() -> None:
    first = [started(1), span(5, 9), span(9, 12, "weights")]
    second = [started(20), span(21, 22, "weights"), span(44, 50)]
    assert outages([*first, *second]) == [(12, 44)]
    assert outages(first) == [] and outages(second) == [] and outages([*first, started(20)]) == []
    assert outages([*first, *second, started(60), span(70, 71)]) == [(12, 44), (50, 70)]


def test_steps_that_waited_for_a_server_to_come_back_are_left_out() -> None:
    steps: list[Row] = [{"step": n, "time_s": 10.0 * n, "step_s": 10.0, "wait_s": 1.0} for n in range(1, 7)]
    steps[2] = {"step": 3, "time_s": 50.0, "step_s": 30.0, "wait_s": 28.0}
    steps[3:] = [{"step": n, "time_s": 20.0 + 10.0 * n, "step_s": 10.0, "wait_s": 1.0} for n in range(4, 7)]
    server = [started(0), span(0, 24), started(30), span(46, 90)]
    calm = undisturbed_steps(steps, [server])
    assert [step["step"] for step in calm] == [1, 2, 4, 5, 6]
    assert undisturbed_steps(steps[2:3], [server]) == steps[2:3], "without others it is all that there is"
