"""summary.json: the figures of a whole run in one dictionary. Pure; it reads and writes no files."""

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
    mean,
    number,
    numbers,
    rate,
    seconds_by_part,
    steady_steps,
    tokens_per_s,
)
from async_grpo.telemetry.timeline import ENGINE_NOTE, PROCESS_TRACK
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
    """The figures of a run; None where something is not known.

    `steps` and `probes` are rows of metrics.jsonl, `stats` the fields of the buffer's BufferStats, `counters` those of
    the run board, `wall_s` the seconds of all invocations from the start of their processes to the report, `prepare_s`
    those before, `servers` the rows of each timeline/rollout-*.jsonl, and `given_up` the servers without which the run
    went on, with the reasons.
    """
    steps = latest_rows(steps, "step")
    generated_tokens = counters.get(GENERATED_TOKENS, 0)
    return {
        **_settings(config),
        **_accuracy(evaluations),
        "steps": len(steps),
        **_reward(steps),
        "generated_tokens": generated_tokens,
        "trained_tokens": int(sum(numbers(steps, "trained_tokens"))),
        "wall_s": wall_s,
        "prepare_s": prepare_s,
        **_whole_run(steps, generated_tokens),
        **_steady(steady_steps(steps, config.max_staleness), servers, config.buffer.selector.kind),
        "weight_updates": update_seconds(row for rows in servers for row in rows),
        **_ages(steps),
        **_logprob_gap([*steps, *latest_rows(probes, "version")]),
        **_groups(stats),
        "restarts": _counters_of(counters, RESTARTS_PREFIX),
        "given_up": dict(given_up),
        "engine_notes": _engine_notes(row for rows in servers for row in rows),
        "reward_failures": _counters_of(counters, REWARD_FAILURES_PREFIX),
        "evaluations": [_facts(evaluation) for evaluation in _by_version(evaluations)],
    }


def _facts(evaluation: Evaluation) -> Facts:
    return {key: value for key, value in msgspec.to_builtins(evaluation).items() if key not in ("kind", "server")}


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
    }


def _whole_run(steps: Sequence[Row], generated_tokens: int) -> Facts:
    """Parts of the wall time, and the throughput of generation per second of the steps."""
    steps_s = sum(numbers(steps, "step_s"))
    return {
        "start_s": sum(numbers(steps, "start_s")),
        "steps_s": steps_s,
        "generated_tokens_per_s": rate(generated_tokens, steps_s),
    }


def _steady(steps: Sequence[Row], servers: Sequence[Sequence[Row]], selector: Selector) -> Facts:
    """Throughput and where the time went, over the steps behind the head start."""
    return {
        "first_timed_step": steps[0]["step"] if steps else None,
        "tokens_per_s": tokens_per_s(steps),
        "trainer_idle": trainer_idle_share(steps),
        "rollout_idle": rollout_idle_share(steps, servers),
        "evaluating": evaluating_share(steps, servers) if servers else None,
        "bottleneck": _verdict(steps, servers, selector),
        "time_split_s": _time_split(steps),
    }


def _verdict(steps: Sequence[Row], servers: Sequence[Sequence[Row]], selector: Selector) -> str:
    """Which side was the bottleneck, from the steps in which no rollout server was started again."""
    calm = undisturbed_steps(steps, servers)
    return describe_bottleneck(
        trainer_idle_share(calm),
        rollout_idle_share(calm, servers),
        evaluating_share(calm, servers) if servers else None,
        selector=selector,
        disturbed=len(steps) - len(calm),
    )


def held_out_score(evaluations: Sequence[Row]) -> str:
    """What the mean score of held-out prompts is: "accuracy" if every answer was right (1) or wrong (0), "reward" if
    answers are graded. The mean of such scores is pass@1."""
    for row in evaluations:
        figures = row.get("figures") or {}
        mean, once = figures.get("mean"), (figures.get("pass_at") or {}).get("1")
        if mean and once and abs(mean["value"] - once["value"]) > 1e-9:
            return "reward"
    return "accuracy"


def learned(summary: Facts) -> str:
    """One line with the held-out score (sampled) of the first and the last policy measured, or else the training
    reward."""
    if summary["accuracy_before"] is None:
        first, last = (figure(summary[key], ".3f") for key in ("reward_first", "reward_last"))
        return f"training reward {first} -> {last} (means of the first and the last tenth of the steps)"
    form = score_format(summary["held_out_score"])
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    change = "" if after is None else f" -> {format(after, form)}"
    return f"held-out {summary['held_out_score']} (sampled) {format(before, form)}{change}"


def score_format(score: str) -> str:
    """The format of a held-out score: percent for an accuracy, a number for a reward."""
    return ".1%" if score == "accuracy" else ".3f"


def _by_version(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    return sorted(evaluations, key=lambda evaluation: evaluation.version)


def _accuracy(evaluations: Sequence[Evaluation]) -> Facts:
    """Accuracies of the first and the last policy version measured; "after" needs a second one."""
    ordered = _by_version(evaluations)
    before = ordered[0] if ordered else None
    after = ordered[-1] if len(ordered) > 1 else None
    return {
        "held_out_score": held_out_score(msgspec.to_builtins(ordered)),
        "accuracy_before": before and before.sampled_accuracy,
        "accuracy_after": after and after.sampled_accuracy,
        "greedy_accuracy_before": before and before.greedy_accuracy,
        "greedy_accuracy_after": after and after.greedy_accuracy,
    }


def _reward(steps: Sequence[Row]) -> Facts:
    """Mean training reward over the first and over the last tenth of the steps."""
    rewards = numbers(steps, "reward_mean")
    tenth = max(1, len(rewards) // 10)
    return {"reward_first": mean(rewards[:tenth]), "reward_last": mean(rewards[-tenth:])}


def _ages(steps: Sequence[Row]) -> Facts:
    """Age of the oldest token, token-weighted mean age, and trained tokens by age.

    Without histograms, the mean age is the token-weighted mean of the steps' means.
    """
    tokens_by_age: dict[int, float] = {}
    for row in steps:
        for age, tokens in (row.get("age_histogram") or {}).items():
            tokens_by_age[int(age)] = tokens_by_age.get(int(age), 0) + tokens
    tokens = sum(tokens_by_age.values())
    weighted = sum(age * count for age, count in tokens_by_age.items())
    oldest = [*numbers(steps, "age_max"), *(age for age, count in tokens_by_age.items() if count)]
    return {
        "max_age": int(max(oldest)) if oldest else None,
        "mean_age": weighted / tokens if tokens else _weighted_mean(steps, "age_mean", "trained_tokens"),
        "tokens_by_age": {str(age): int(tokens_by_age[age]) for age in sorted(tokens_by_age)},
    }


def _logprob_gap(rows: Sequence[Row]) -> Facts:
    """The gap over all tokens that both sides computed with the same weights: age 0 in training, and probes."""
    largest = numbers(rows, "logprob_gap_max")
    return {
        "logprob_gap_mean": _weighted_mean(rows, "logprob_gap_mean", "gap_tokens"),
        "logprob_gap_max": max(largest, default=None),
        "gap_tokens": int(sum(numbers(rows, "gap_tokens"))),
    }


def _groups(stats: Mapping[str, Any]) -> Facts:
    """The counters of groups, and whether admitted == released + active; `active` is counted from the sets."""
    released = stats.get("released") or {}
    ended = {reason.value: int(released.get(reason.value, 0)) for reason in ReleaseReason}
    active = sum(int(stats.get(place) or 0) for place in ("inflight", "ready", "taken"))
    admitted = stats.get("admitted")
    balanced = admitted == sum(released.values()) + active if admitted else None  # nothing to balance without groups
    return {"groups": {"admitted": admitted, **ended, "active": active}, "balanced": balanced}


def _engine_notes(rows: Iterable[Row]) -> dict[str, str]:
    """Rollout server -> why its engine did not run as configured."""
    notes = [row for row in rows if (row.get("track"), row.get("name")) == (PROCESS_TRACK, ENGINE_NOTE)]
    return {str(row.get("role")): str((row.get("args") or {}).get("note", "")) for row in notes}


def _counters_of(counters: Mapping[str, int], prefix: str) -> dict[str, int]:
    """The counters whose names begin with `prefix`, without it."""
    found = {name.removeprefix(prefix): count for name, count in counters.items() if name.startswith(prefix)}
    return dict(sorted(found.items()))


def _time_split(steps: Sequence[Row]) -> dict[str, float]:
    """Part of the trainer's step -> seconds over these steps."""
    total: dict[str, float] = {}
    for row in steps:
        for part, spent_s in seconds_by_part(row).items():
            total[part] = total.get(part, 0.0) + spent_s
    return total


def _weighted_mean(rows: Sequence[Row], key: str, weight_key: str) -> float | None:
    pairs = [(number(row, key), number(row, weight_key)) for row in rows]
    known = [(value, weight) for value, weight in pairs if value is not None and weight is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None
