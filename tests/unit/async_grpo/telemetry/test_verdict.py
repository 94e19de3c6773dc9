"""The verdict on a run: its three answers, and what to do next."""

from __future__ import annotations

from typing import Any

import pytest

from async_grpo.telemetry.verdict import (
    MAX_GAP_NATS,
    VerdictState,
    judge_learning,
    judge_run,
    judge_soundness,
    judge_speed,
    suggest_next_step,
    training_reward,
)

YES, CHECK, NO, UNKNOWN = VerdictState.YES, VerdictState.CHECK, VerdictState.NO, VerdictState.UNKNOWN
SOUND = {"max_age": 2, "age_bound": 2, "logprob_gap_mean": 1e-6, "balanced": True}
RISING = {"steps": 20, "reward_first": 0.2, "reward_last": 0.8, "reward_change_error": 0.05}


def evaluations(*scores: float, half_width: float | None = None) -> list[dict[str, Any]]:
    rows = []
    for version, score in enumerate(scores):
        mean = None if half_width is None else {"value": score, "low": score - half_width, "high": score + half_width}
        rows.append({"version": version, "sampled_accuracy": score, "figures": {"mean": mean} if mean else None})
    return rows


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({}, UNKNOWN),
        (RISING, YES),
        ({**RISING, "reward_last": 0.25}, CHECK),
        ({**RISING, "reward_last": 0.05}, NO),
        ({**RISING, "steps": 3}, UNKNOWN),
        ({**RISING, "evaluations": evaluations(0.5, 0.52, half_width=0.05)}, CHECK),
        ({"evaluations": evaluations(0.2, 0.5, 0.9, half_width=0.05)}, YES),
        ({"evaluations": evaluations(0.9, 0.2)}, NO),
        ({**RISING, "evaluations": evaluations(0.4)}, YES),
    ],
)
def test_learning_is_a_change_beyond_its_noise(facts: dict[str, Any], state: VerdictState) -> None:
    assert judge_learning(facts).state is state


def test_the_noise_of_the_reward_does_not_contain_its_trend() -> None:
    rising = training_reward([step / 100 for step in range(100)])
    assert rising["reward_change_error"] < 0.01 < rising["reward_last"] - rising["reward_first"]
    assert training_reward([0.5])["reward_change_error"] is None
    assert training_reward([])["reward_first"] is None


@pytest.mark.parametrize(("waits", "state"), [(0.05, YES), (0.3, CHECK), (None, UNKNOWN)])
def test_speed_is_judged_by_the_waits_of_the_trainer(waits: float | None, state: VerdictState) -> None:
    assert judge_speed({"trainer_idle": waits, "rollout_idle": 0.5, "tokens_per_s": 1000.0}).state is state


@pytest.mark.parametrize(
    ("facts", "state", "short"),
    [
        (SOUND, YES, "oldest trained token 2 of at most 2 steps"),
        ({**SOUND, "max_age": 3}, NO, "age bound was broken"),
        ({**SOUND, "logprob_gap_mean": 2 * MAX_GAP_NATS}, NO, "different policies"),
        ({**SOUND, "balanced": False}, NO, "groups are missing"),
        ({**SOUND, "restarts": {"trainer": 1, "rollout-0": 1}}, CHECK, "2 restarts"),
        ({**SOUND, "reward_failures": {"timeout": 1200}}, CHECK, "1,200 completions"),
        ({**SOUND, "given_up": {"rollout-1": "why"}}, CHECK, "continued without rollout-1"),
        ({}, UNKNOWN, "too early"),
    ],
)
def test_a_broken_promise_is_unsound_and_a_restart_only_a_remark(
    facts: dict[str, Any], state: VerdictState, short: str
) -> None:
    answer = judge_soundness(facts)
    assert answer.state is state
    assert short in answer.short


def test_the_next_step_is_soundness_before_learning_before_speed() -> None:
    slow = {**SOUND, **RISING, "trainer_idle": 0.5, "rollout_idle": 0.0}
    flat = {**slow, "reward_last": 0.2}
    broken = {**flat, "max_age": 9}
    fine = {**slow, "trainer_idle": 0.0}
    for facts, part in ((broken, "Do not trust"), (flat, "runs samples R"), (slow, "why R"), (fine, "resume R")):
        assert part in suggest_next_step(facts, judge_run(facts), "R")
