"""PointMetrics: the metrics of one run, read from its files.

    summary.json, metrics.jsonl, timeline/*.jsonl  -->  PointMetrics

Any file may be missing: a run that was killed has no summary yet. Throughput and idle shares come from the functions
that the run's own report uses (`telemetry.rows`, `telemetry.idle`), so both show the same values.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence

import msgspec

from async_grpo.app.launch.run_folder import RunFolder
from async_grpo.app.report.drawing import Z_95
from async_grpo.lab.sweep.plan import Point
from async_grpo.telemetry.idle import rollout_idle_share, trainer_idle_share
from async_grpo.telemetry.jsonl import read_rows
from async_grpo.telemetry.rows import (
    Facts,
    Row,
    latest_rows,
    mean,
    number,
    numbers,
    rate,
    rows_of_kind,
    steady_steps,
    tokens_per_s,
)

FINISHED, FAILED, UNFINISHED, NEW = "finished", "failed", "unfinished", "not begun"
"""Values of `PointMetrics.state`; part of sweep.json."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Mean reward of every step."""

    steps: list[int] = []
    seconds: list[float] = []
    """Duration of the trainer's steps up to this one, including waits, excluding starts."""
    reward: list[float] = []


class PointMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of one point. Shares are between 0 and 1, ages in optimizer steps; None means unknown."""

    name: str
    values: dict[str, str]
    """Key of the grid -> its resolved value."""
    seed: int
    state: str
    """`finished`, `failed`, `unfinished` or `not begun`."""
    error: str = ""
    at_once: int = 1
    steps_done: int = 0
    steps: int = 0
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    accuracy_mean: float | None = None
    """Area under the accuracy over the evaluated versions, divided by their range."""
    greedy_accuracy_before: float | None = None
    greedy_accuracy_after: float | None = None
    eval_prompts: int | None = None
    held_out_score: str = "accuracy"
    """"reward" where held-out answers are graded; the accuracies are then mean rewards."""
    eval_error: float | None = None
    """Standard error of such a mean reward, from its interval."""
    reward_first: float | None = None
    reward_last: float | None = None
    reward_mean: float | None = None
    """Mean over all steps: the area under the reward curve, divided by the number of steps."""
    wall_s: float | None = None
    """Seconds of all invocations, starts and evaluations included."""
    steps_s: float | None = None
    """Seconds of the trainer's steps, waits included."""
    tokens_per_s: float | None = None
    """Trained tokens per second, over the steps after the head start (`steady_steps`).

    samples_per_s and both idle shares are over the same steps.
    """
    samples_per_s: float | None = None
    generated_tokens: int | None = None
    trained_tokens: int | None = None
    trainer_idle: float | None = None
    rollout_idle: float | None = None
    age_mean: float | None = None
    age_max: int | None = None
    age_bound: int | None = None
    ess: float | None = None
    """Effective sample size of the importance weights, as a share of the tokens; mean over the steps."""
    clip_fraction: float | None = None
    kl: float | None = None
    """KL divergence from the reference model, if the run has one; mean over the last tenth of the steps."""
    logprob_gap_mean: float | None = None
    logprob_gap_max: float | None = None
    balanced: bool | None = None
    curve: Curve = Curve()


MIN_WINDOWS = 4
"""Minimum length of a run in staleness windows of S + 1 steps.

A shorter run mostly trains groups generated before its first step and does not reach its steady pace.
"""


def min_steady_steps(point: PointMetrics) -> int:
    """Return the number of steps below which the point's speed is not meaningful; 0 if its age bound is unknown."""
    return 0 if point.age_bound is None else MIN_WINDOWS * (point.age_bound + 1)


def read_metrics(point: Point, values: dict[str, str], *, error: str = "", at_once: int = 1) -> PointMetrics:
    """Read the metrics of a point from its run folder. `error` is that of the last attempt."""
    folder = RunFolder(point.config.run_dir)
    rows = latest_rows(rows_of_kind(read_rows(folder.path / "metrics.jsonl"), "step"), "step")
    servers = [read_rows(path) for path in sorted((folder.path / "timeline").glob("rollout-*.jsonl"))]
    summary_file = folder.path / "summary.json"
    summary = json.loads(summary_file.read_text(encoding="utf-8")) if summary_file.exists() else {}

    if point.is_finished:
        state = FINISHED
        error = ""  # of an earlier attempt
    elif error:
        state = FAILED
    else:
        state = UNFINISHED if rows else NEW
    return PointMetrics(
        name=point.name,
        values=values,
        seed=point.seed,
        state=state,
        error=error,
        at_once=at_once,
        steps_done=len(rows),
        steps=point.config.steps,
        **summary_metrics(summary),
        **row_metrics(rows, servers, group_size=point.config.group_size, max_staleness=point.config.max_staleness),
    )


_COPIED_FROM_SUMMARY = (
    "accuracy_before",
    "accuracy_after",
    "greedy_accuracy_before",
    "greedy_accuracy_after",
    "reward_first",
    "reward_last",
    "wall_s",
    "generated_tokens",
    "trained_tokens",
    "age_bound",
    "logprob_gap_mean",
    "logprob_gap_max",
    "balanced",
)


def summary_metrics(summary: Facts) -> Facts:
    """Return the fields of PointMetrics that the run's summary.json has."""
    evaluations = summary.get("evaluations") or []
    score = summary.get("held_out_score") or "accuracy"
    eval_error = eval_prompts = None
    if evaluations:
        eval_prompts = evaluations[-1].get("prompts")
        interval = (evaluations[-1].get("figures") or {}).get("mean")
        if score == "reward" and interval:
            eval_error = (interval["high"] - interval["low"]) / (2 * Z_95)
    return {
        **{key: summary.get(key) for key in _COPIED_FROM_SUMMARY},
        "accuracy_mean": _mean_accuracy(evaluations),
        "held_out_score": score,
        "eval_error": eval_error,
        "age_mean": summary.get("mean_age"),
        "age_max": summary.get("max_age"),
        "eval_prompts": eval_prompts,
    }


def _mean_accuracy(evaluations: Sequence[Facts]) -> float | None:
    """Return the area under the accuracy by the trapezoidal rule, divided by the range of versions."""
    measured = []
    for evaluation in evaluations:
        accuracy = evaluation.get("sampled_accuracy")
        if accuracy is not None:
            measured.append((evaluation["version"], accuracy))
    if len(measured) < 2:
        return None
    areas = [(v - u) * (a + b) / 2 for (u, a), (v, b) in itertools.pairwise(measured)]
    return sum(areas) / (measured[-1][0] - measured[0][0])


def row_metrics(
    rows: Sequence[Row], servers: Sequence[Iterable[Row]] = (), *, group_size: int, max_staleness: int
) -> Facts:
    """Return the fields of PointMetrics that follow from the step rows and the rollout servers' timelines.

    `rows` has one row per step, in order.
    """
    steady = steady_steps(rows, max_staleness)
    samples = sum(numbers(steady, "groups")) * group_size
    last_tenth = rows[-max(1, len(rows) // 10) :]
    return {
        "reward_mean": mean(numbers(rows, "reward_mean")),
        "steps_s": sum(numbers(rows, "step_s")) if rows else None,
        "tokens_per_s": tokens_per_s(steady),
        "samples_per_s": rate(samples or None, sum(numbers(steady, "step_s"))),
        "trainer_idle": trainer_idle_share(steady),
        "rollout_idle": rollout_idle_share(steady, servers),
        "ess": mean(numbers(rows, "ess")),
        "clip_fraction": mean(numbers(rows, "clip_fraction")),
        "kl": mean(numbers(last_tenth, "kl")),
        "curve": _reward_curve(rows),
    }


def _reward_curve(rows: Sequence[Row]) -> Curve:
    steps = []
    seconds = []
    rewards = []
    elapsed_s = 0.0
    for row in rows:
        elapsed_s += number(row, "step_s") or 0.0
        reward = number(row, "reward_mean")
        if reward is not None:
            steps.append(int(row["step"]))
            seconds.append(elapsed_s)
            rewards.append(reward)
    return Curve(steps=steps, seconds=seconds, reward=rewards)
