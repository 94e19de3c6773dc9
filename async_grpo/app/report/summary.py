"""Content of summary.json: the metrics of a whole run in one dictionary. This module reads and writes no files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from async_grpo.config.schema import RunConfig
from async_grpo.staleness import Selector
from async_grpo.telemetry.bottleneck import describe_bottleneck
from async_grpo.telemetry.idle import (
    evaluating_share,
    rollout_idle_share,
    trainer_idle_share,
    undisturbed_steps,
)
from async_grpo.telemetry.rows import (
    GENERATED_TOKENS,
    RESTARTS_PREFIX,
    REWARD_FAILURES_PREFIX,
    Facts,
    Row,
    latest_rows,
    number,
    numbers,
    rate,
    seconds_by_part,
    steady_steps,
    tokens_per_s,
)
from async_grpo.telemetry.timeline import ENGINE_NOTE, PROCESS_TRACK
from async_grpo.telemetry.verdict import training_reward
from async_grpo.telemetry.weight_updates import update_seconds
from async_grpo.utils.text import figure
from async_grpo.wire.board import Evaluation
from async_grpo.wire.records import ReleaseReason


def summarize(
    config: RunConfig,
    steps: Iterable[Row],
    probes: Iterable[Row],
    evaluations: Sequence[Evaluation],
    stats: Mapping[str, Any],
    counters: Mapping[str, int],
    wall_s: float,
    *,
    prepare_s: float | None = None,
    servers: Sequence[Sequence[Row]] = (),
    given_up: Mapping[str, str] = MappingProxyType({}),
) -> Facts:
    """Return the metrics of a run; None for those that are not known.

    Args:
        config: The run.
        steps: Rows of metrics.jsonl of kind `step`.
        probes: Rows of metrics.jsonl of kind `probe`.
        evaluations: Evaluations on the board, in any order.
        stats: Fields of the buffer's `BufferStats`.
        counters: Counters of the run board.
        wall_s: Seconds from the start of the processes to the report, summed over all invocations.
        prepare_s: Seconds before, for the first policy.
        servers: Rows of each timeline/rollout-*.jsonl.
        given_up: Rollout server that the run continued without -> reason.
    """
    steps = latest_rows(steps, "step")
    generated_tokens = counters.get(GENERATED_TOKENS, 0)
    return {
        **_settings(config),
        **_held_out_scores(evaluations),
        "steps": len(steps),
        **training_reward(numbers(steps, "reward_mean")),
        "generated_tokens": generated_tokens,
        "trained_tokens": int(sum(numbers(steps, "trained_tokens"))),
        "wall_s": wall_s,
        "prepare_s": prepare_s,
        **_run_times(steps, generated_tokens),
        **_steady_state(steady_steps(steps, config.max_staleness), servers, config.buffer.selector.kind),
        "weight_updates": update_seconds(row for rows in servers for row in rows),
        **_ages(steps),
        **_logprob_gap([*steps, *latest_rows(probes, "version")]),
        **_group_accounting(stats),
        "restarts": _counters_with_prefix(counters, RESTARTS_PREFIX),
        "given_up": dict(given_up),
        "engine_notes": _engine_notes(row for rows in servers for row in rows),
        "reward_failures": _counters_with_prefix(counters, REWARD_FAILURES_PREFIX),
        "evaluations": [_evaluation_facts(evaluation) for evaluation in _sort_by_version(evaluations)],
    }


def _evaluation_facts(evaluation: Evaluation) -> Facts:
    facts: Facts = msgspec.to_builtins(evaluation)
    return {key: value for key, value in facts.items() if key not in ("kind", "server")}


def _settings(config: RunConfig) -> Facts:
    return {
        "name": config.name,
        "seed": config.seed,
        "max_staleness": config.max_staleness,
        "age_bound": config.replay_policy.age_bound,
        "groups_per_step": config.groups_per_step,
        "group_size": config.group_size,
        "capacity_groups": config.capacity_groups,
        "max_tokens": config.sampling.max_tokens,
        "sampling": config.sampling.summary,
    }


def _run_times(steps: Sequence[Row], generated_tokens: int) -> Facts:
    """Return the parts of the wall time, and the tokens generated per second of the steps."""
    steps_s = sum(numbers(steps, "step_s"))
    return {
        "start_s": sum(numbers(steps, "start_s")),
        "steps_s": steps_s,
        "generated_tokens_per_s": rate(generated_tokens, steps_s),
    }


def _steady_state(steps: Sequence[Row], servers: Sequence[Sequence[Row]], selector: Selector) -> Facts:
    """Return throughput, idle shares and the time of each part over the steady-state steps."""
    return {
        "first_timed_step": steps[0]["step"] if steps else None,
        "tokens_per_s": tokens_per_s(steps),
        "trainer_idle": trainer_idle_share(steps),
        "rollout_idle": rollout_idle_share(steps, servers),
        "evaluating": evaluating_share(steps, servers) if servers else None,
        "bottleneck": _describe_bottleneck(steps, servers, selector),
        "time_split_s": _time_split(steps),
    }


def _describe_bottleneck(steps: Sequence[Row], servers: Sequence[Sequence[Row]], selector: Selector) -> str:
    """Return a sentence about the bottleneck, from the steps without a restart of a rollout server."""
    undisturbed = undisturbed_steps(steps, servers)
    return describe_bottleneck(
        trainer_idle_share(undisturbed),
        rollout_idle_share(undisturbed, servers),
        evaluating_share(undisturbed, servers) if servers else None,
        selector=selector,
        disturbed=len(steps) - len(undisturbed),
    )


def name_held_out_score(evaluations: Sequence[Row]) -> str:
    """Return "accuracy" if every answer was right (1) or wrong (0), "reward" if answers are graded.

    For scores of 0 and 1, the mean equals pass@1.
    """
    for row in evaluations:
        metrics = row.get("figures") or {}
        mean_score = metrics.get("mean")
        pass_at_1 = (metrics.get("pass_at") or {}).get("1")
        if mean_score and pass_at_1 and abs(mean_score["value"] - pass_at_1["value"]) > 1e-9:
            return "reward"
    return "accuracy"


def choose_score_format(score: str) -> str:
    """Return the format of a held-out score: percent for an accuracy, a number for a reward."""
    return ".1%" if score == "accuracy" else ".3f"


def describe_learning(summary: Facts) -> str:
    """Return one line with the sampled held-out score of the first and last measured policy, or the training reward if
    none was measured."""
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    if before is None:
        first, last = (figure(summary[key], ".3f") for key in ("reward_first", "reward_last"))
        return f"training reward {first} -> {last} (means of the first and the last tenth of the steps)"

    form = choose_score_format(summary["held_out_score"])
    text = f"held-out {summary['held_out_score']} (sampled) {format(before, form)}"
    return text if after is None else f"{text} -> {format(after, form)}"


def _sort_by_version(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    return sorted(evaluations, key=lambda evaluation: evaluation.version)


def _held_out_scores(evaluations: Sequence[Evaluation]) -> Facts:
    """Return the scores of the first and last measured version. One evaluation alone has no "after"."""
    by_version = _sort_by_version(evaluations)
    before = by_version[0] if by_version else None
    after = by_version[-1] if len(by_version) > 1 else None
    return {
        "held_out_score": name_held_out_score(msgspec.to_builtins(by_version)),
        "accuracy_before": before and before.sampled_accuracy,
        "accuracy_after": after and after.sampled_accuracy,
        "greedy_accuracy_before": before and before.greedy_accuracy,
        "greedy_accuracy_after": after and after.greedy_accuracy,
    }


def _ages(steps: Sequence[Row]) -> Facts:
    """Return the age of the oldest token, the token-weighted mean age, and the trained tokens by age.

    Without histograms, the mean age is computed from the means of the steps.
    """
    tokens_by_age: dict[int, float] = {}
    for row in steps:
        for age, tokens in (row.get("age_histogram") or {}).items():
            tokens_by_age[int(age)] = tokens_by_age.get(int(age), 0) + tokens

    max_ages = [*numbers(steps, "age_max"), *(age for age, tokens in tokens_by_age.items() if tokens)]
    total_tokens = sum(tokens_by_age.values())
    mean_age: float | None
    if total_tokens:
        mean_age = sum(age * tokens for age, tokens in tokens_by_age.items()) / total_tokens
    else:
        mean_age = _weighted_mean(steps, "age_mean", "trained_tokens")
    return {
        "max_age": int(max(max_ages)) if max_ages else None,
        "mean_age": mean_age,
        "tokens_by_age": {str(age): int(tokens_by_age[age]) for age in sorted(tokens_by_age)},
    }


def _logprob_gap(rows: Sequence[Row]) -> Facts:
    """Return the gap over all tokens that both sides computed with the same weights: age 0 in training, and probes."""
    return {
        "logprob_gap_mean": _weighted_mean(rows, "logprob_gap_mean", "gap_tokens"),
        "logprob_gap_max": max(numbers(rows, "logprob_gap_max"), default=None),
        "gap_tokens": int(sum(numbers(rows, "gap_tokens"))),
    }


def _group_accounting(stats: Mapping[str, Any]) -> Facts:
    """Return the counters of groups, and True for `balanced` if admitted == released + active.

    The active groups are counted in the sets that hold them, not derived from the other counters: the equation would
    always hold then. `balanced` is None without groups.
    """
    released = stats.get("released") or {}
    released_by_reason = {reason.value: int(released.get(reason.value, 0)) for reason in ReleaseReason}
    active = sum(int(stats.get(key) or 0) for key in ("inflight", "ready", "taken"))
    admitted = stats.get("admitted")
    balanced = admitted == sum(released.values()) + active if admitted else None
    return {"groups": {"admitted": admitted, **released_by_reason, "active": active}, "balanced": balanced}


def _engine_notes(rows: Iterable[Row]) -> dict[str, str]:
    """Return for each rollout server the reason why its engine did not run as configured."""
    notes = {}
    for row in rows:
        if (row.get("track"), row.get("name")) == (PROCESS_TRACK, ENGINE_NOTE):
            notes[str(row.get("role"))] = str((row.get("args") or {}).get("note", ""))
    return notes


def _counters_with_prefix(counters: Mapping[str, int], prefix: str) -> dict[str, int]:
    """Return the counters whose names start with `prefix`, sorted by the rest of their names."""
    return {name.removeprefix(prefix): counters[name] for name in sorted(counters) if name.startswith(prefix)}


def _time_split(steps: Sequence[Row]) -> dict[str, float]:
    """Return the seconds of each part of a step, summed over the steps."""
    seconds: dict[str, float] = {}
    for row in steps:
        for part, part_s in seconds_by_part(row).items():
            seconds[part] = seconds.get(part, 0.0) + part_s
    return seconds


def _weighted_mean(rows: Sequence[Row], key: str, weight_key: str) -> float | None:
    """Return the mean of `key` over the rows that have both keys; None if their weights sum to 0."""
    pairs = []
    for row in rows:
        value, weight = number(row, key), number(row, weight_key)
        if value is not None and weight is not None:
            pairs.append((value, weight))
    total_weight = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total_weight if total_weight else None
