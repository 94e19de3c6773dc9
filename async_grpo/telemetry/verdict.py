"""The verdict on a run: is it learning, is it fast, is it sound? The terminal, the page of runs and reports share it.

    summary.json, or the same metrics of a live run --> judge_run --> three VerdictAnswers --> suggest_next_step

All functions are pure. Missing metrics make an answer unknown, never good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from async_grpo.telemetry.bottleneck import WAITS, Bottleneck, find_bottleneck
from async_grpo.telemetry.rows import Facts, Row, mean, number
from async_grpo.utils.text import figure

MIN_STEPS = 8
"""Fewer steps say nothing about the training reward: its first and last tenth are single steps."""
MAX_GAP_NATS = 0.1
"""Mean log-probability gap above which engine and trainer do not compute the same policy. An alert of
deploy/prometheus uses the same value."""
_Z_95 = 1.96


class VerdictState(StrEnum):
    """Answer to a question about a run."""

    YES = "yes"
    CHECK = "check"
    """Not clearly, or with a remark that deserves a look."""
    NO = "no"
    UNKNOWN = "too early"


@dataclass(frozen=True, slots=True)
class VerdictAnswer:
    """Answer to one question, in a few words and in sentences."""

    question: str
    """learning, speed or soundness."""
    state: VerdictState
    short: str
    text: str


def judge_run(facts: Facts, *, warnings: int = 0) -> list[VerdictAnswer]:
    """Return the three answers. `facts` has keys of summary.json; `warnings` is the number of the run's warnings."""
    return [judge_learning(facts), judge_speed(facts), judge_soundness(facts, warnings=warnings)]


def training_reward(rewards: Sequence[float]) -> Facts:
    """Return the mean training reward of the first and of the last tenth of the steps, and the standard error of their
    difference."""
    tenth = max(1, len(rewards) // 10)
    error = None
    if len(rewards) > 1:
        # Differences between successive steps measure the noise without the trend.
        error = float(np.sqrt(np.mean(np.diff(rewards) ** 2) / tenth))
    return {
        "reward_first": mean(rewards[:tenth]),
        "reward_last": mean(rewards[-tenth:]),
        "reward_change_error": error,
    }


def judge_learning(facts: Facts) -> VerdictAnswer:
    """Judge by the held-out score if it was measured twice, otherwise by the training reward.

    A change counts if it is larger than its 95% interval.
    """
    score = facts.get("held_out_score") or "accuracy"
    form = ".1%" if score == "accuracy" else ".3f"
    reward, reward_text = _judge_reward(facts)
    held_out, held_out_text = _judge_held_out(facts.get("evaluations") or [], f"held-out {score}", form)

    state = held_out if held_out is not VerdictState.UNKNOWN else reward
    sentences = [sentence for sentence in (held_out_text, reward_text) if sentence]
    if not sentences:
        return VerdictAnswer("learning", VerdictState.UNKNOWN, "too early to tell", "No step has been trained yet.")
    text = ". ".join(f"{sentence[0].upper()}{sentence[1:]}" for sentence in sentences) + "."
    return VerdictAnswer("learning", state, sentences[0], text)


def _judge_held_out(evaluations: Sequence[Row], name: str, form: str) -> tuple[VerdictState, str]:
    """Return the state and a clause from the first and the last evaluation."""
    measured = [row for row in evaluations if number(row, "sampled_accuracy") is not None]
    if len(measured) < 2:
        if not measured:
            return VerdictState.UNKNOWN, ""
        return VerdictState.UNKNOWN, f"{name} {format(measured[0]['sampled_accuracy'], form)}, measured once"

    first, last = measured[0], measured[-1]
    before, after = float(first["sampled_accuracy"]), float(last["sampled_accuracy"])
    change = f"{format(before, form)} → {format(after, form)}"
    low_before, high_before = _interval(first, before)
    low_after, high_after = _interval(last, after)
    if low_after > high_before:
        return VerdictState.YES, f"{name} rose: {change}"
    if high_after < low_before:
        return VerdictState.NO, f"{name} fell: {change}"
    return VerdictState.CHECK, f"{name} has not clearly changed: {change}"


def _interval(evaluation: Row, value: float) -> tuple[float, float]:
    """Return the 95% interval of the sampled score; the value itself if none was computed."""
    estimate = (evaluation.get("figures") or {}).get("mean")
    return (estimate["low"], estimate["high"]) if estimate else (value, value)


def _judge_reward(facts: Facts) -> tuple[VerdictState, str]:
    first, last = number(facts, "reward_first"), number(facts, "reward_last")
    if first is None or last is None:
        return VerdictState.UNKNOWN, ""
    change = f"{first:.3f} → {last:.3f}"
    if (number(facts, "steps") or 0) < MIN_STEPS:
        return VerdictState.UNKNOWN, f"training reward {change}, after few steps"

    # A summary of an older release has no error, so any change counts.
    noise = _Z_95 * (number(facts, "reward_change_error") or 0.0)
    if last - first > noise:
        return VerdictState.YES, f"training reward rose: {change}"
    if first - last > noise:
        return VerdictState.NO, f"training reward fell: {change}"
    return VerdictState.CHECK, f"training reward has not clearly changed: {change}"


def judge_speed(facts: Facts) -> VerdictAnswer:
    """Judge by the waits of both sides. A trainer that hardly waits is as fast as this trainer can be."""
    trainer_idle, rollout_idle = number(facts, "trainer_idle"), number(facts, "rollout_idle")
    tokens_per_s = number(facts, "tokens_per_s")
    if trainer_idle is None:
        return VerdictAnswer("speed", VerdictState.UNKNOWN, "too early to tell", "No step has been timed yet.")

    speed = f"{figure(tokens_per_s, ',.0f')} tokens/s"
    waits = f"trainer waits {trainer_idle:.0%}"
    if rollout_idle is not None:
        waits += f", servers {rollout_idle:.0%}"
    text = facts.get("bottleneck") or f"The trainer waited for rollouts {trainer_idle:.0%} of its time."
    state = VerdictState.YES if trainer_idle <= WAITS else VerdictState.CHECK
    return VerdictAnswer("speed", state, f"{speed}, {waits}", f"{speed} trained. {text}")


def judge_soundness(facts: Facts, *, warnings: int = 0) -> VerdictAnswer:
    """Judge by the age bound, the log-probability gap and the accounting of groups; restarts and warnings are
    remarks."""
    errors: list[str] = []
    confirmed: list[str] = []
    max_age, bound = number(facts, "max_age"), number(facts, "age_bound")
    if max_age is not None and bound is not None:
        ages = f"oldest trained token {max_age:.0f} of at most {bound:.0f} steps"
        if max_age > bound:
            errors.append(f"the age bound was broken: {ages}")
        else:
            confirmed.append(ages)

    gap = number(facts, "logprob_gap_mean")
    if gap is not None:
        agreement = f"log-probability gap {gap:.1e} nats"
        if gap > MAX_GAP_NATS:
            errors.append(f"engine and trainer compute different policies: {agreement}")
        else:
            confirmed.append(agreement)

    if facts.get("balanced") is False:
        errors.append("groups are missing: admitted is not released + active")
    elif facts.get("balanced"):
        confirmed.append("every group is accounted for")

    remarks = _list_remarks(facts, warnings)
    clauses = [*errors, *remarks, *confirmed]
    if not clauses:
        return VerdictAnswer("soundness", VerdictState.UNKNOWN, "too early to tell", "Nothing has been checked yet.")
    state = VerdictState.YES
    if remarks:
        state = VerdictState.CHECK
    if errors:
        state = VerdictState.NO
    text = "; ".join(clauses)
    return VerdictAnswer("soundness", state, clauses[0], f"{text[0].upper()}{text[1:]}.")


def _list_remarks(facts: Facts, warnings: int) -> list[str]:
    restarts = sum((facts.get("restarts") or {}).values())
    unjudged = sum((facts.get("reward_failures") or {}).values())
    lost = ", ".join(facts.get("given_up") or {})
    remarks = []
    if lost:
        remarks.append(f"continued without {lost}")
    if restarts:
        remarks.append(f"{restarts} restart{'s' if restarts > 1 else ''}")
    if unjudged:
        remarks.append(f"{unjudged:,} completions could not be judged")
    if warnings:
        remarks.append(f"{warnings} warning{'s' if warnings > 1 else ''}")
    return remarks


def suggest_next_step(facts: Facts, answers: Sequence[VerdictAnswer], run: str) -> str:
    """Return what to do next, in one or two sentences: soundness first, then learning, then speed.

    `run`: the folder of the run, for commands.
    """
    learning, _, soundness = answers
    if soundness.state is VerdictState.NO:
        return f"Do not trust this run before this is fixed: {soundness.short}."
    if learning.state in (VerdictState.NO, VerdictState.CHECK):
        return (
            f"Read completions before you change a setting: `async-grpo runs samples {run} --best` and `--worst` show "
            "whether the reward measures what you want."
        )
    trainer_idle, rollout_idle = number(facts, "trainer_idle"), number(facts, "rollout_idle")
    if trainer_idle is not None and rollout_idle is not None:
        if find_bottleneck(trainer_idle, rollout_idle) is Bottleneck.TRAINING:
            return "A faster trainer would make the run faster; the rollout servers wait for it."
        if trainer_idle > WAITS:
            return f"`async-grpo why {run}` shows what the trainer waited for, and simulates changes."
    if learning.state is VerdictState.UNKNOWN:
        return "Train longer, or measure held-out prompts (eval.prompts), to see whether the run learns."
    return f"Nothing needs a change. `async-grpo resume {run} --steps N` trains it further."
