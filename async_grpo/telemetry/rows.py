"""The rows that a run writes, and how to read them.

    metrics.jsonl     kind "step"      the keys of `metrics.METRICS`
                      kind "probe"     version, logprob_gap_mean, logprob_gap_max, gap_tokens: the gap on groups whose
                                       every token comes from `version`
                      kind "staleness" step, staleness_before, staleness, reason: another S came into force
                      kind "warning"   step, message: something that a person should look at
    samples/*.jsonl   one finished group: prompt, answer, completions with text, reward and spans, which are
                      [version, start, end) over the completion's tokens; of each token its text (pieces) and its
                      log-probability under the policy that sampled it (logprobs, 4 digits)
    trained.jsonl     one step: the step, and of its groups that are in samples/*.jsonl the advantages of their samples

Readers tolerate missing keys: a file may come from an older version or from a run cut short. A resumed run repeats
steps; the last row of a step counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from async_grpo.telemetry.metrics import PHASES

Row = Mapping[str, Any]
Facts = dict[str, Any]
"""Key -> value of a summary, as JSON has it; None where something is not known."""

GENERATED_TOKENS = "generated_tokens"
"""Counter of the run board: completion tokens sampled by all rollout servers."""
RESTARTS_PREFIX = "restarts."
"""Counters of the run board: `restarts.<role>`."""
REWARD_FAILURES_PREFIX = "reward_failures."
"""Counters of the run board: `reward_failures.<kind>`, completions that a verifier could not judge."""

TIME_KEYS = tuple(f"{phase}_s" for phase in PHASES)
"""The parts of a step, in order; what they leave of `step_s` is "other"."""


def is_sampled(seq: int, every: int) -> bool:
    """Whether the group belongs to the `telemetry.samples_every`-th ones that are written for people to read.

    Server and trainer go by the group's sequence number, so that both write about the same groups.
    """
    return seq % every == 0


def last_of_each(rows: Iterable[Row], key: str) -> list[Row]:
    """The last row written for each value of `key`, in order of `key`; rows without it are left out."""
    latest = {row[key]: row for row in rows if isinstance(row.get(key), int)}
    return [latest[value] for value in sorted(latest)]


def rows_of_kind(rows: Iterable[Row], kind: str) -> list[Row]:
    """The rows of one kind, in file order."""
    return [row for row in rows if row.get("kind") == kind]


def number(row: Row, key: str) -> float | None:
    """A numeric field, or None where it is missing or null."""
    value = row.get(key)
    return float(value) if isinstance(value, (int, float)) else None


def numbers(rows: Sequence[Row], key: str) -> list[float]:
    """The values of a numeric field, of every row that has it."""
    return [value for row in rows if (value := number(row, key)) is not None]


def mean(values: Sequence[float]) -> float | None:
    """The mean of the values, None if there are none."""
    return sum(values) / len(values) if values else None


def rate(amount: float | None, spent_s: float) -> float | None:
    """The amount per second; None if the amount is not known or no time was spent."""
    return amount / spent_s if amount is not None and spent_s > 0 else None


def head_start_steps(steps: int, max_staleness: int) -> int:
    """Number of steps that are left out of rates: see `behind_head_start`."""
    return min(max_staleness + 1, steps // 2)


def behind_head_start(rows: Sequence[Row], max_staleness: int) -> Sequence[Row]:
    """The step rows without the first S + 1, or without the first half if that is less.

    Those steps train what was generated while the trainer waited for its first batch, and no step counts that wait.
    With them, a run would look faster than it is, and the more so the larger its window.
    """
    return rows[head_start_steps(len(rows), max_staleness) :]


def tokens_per_s(rows: Sequence[Row]) -> float | None:
    """Throughput of a run: tokens trained, per second of the trainer's steps, waits included. None if unknown.

    Every display shows this: the terminal for the last step, plots for each step, and reports, sweeps and lists of runs
    over the steps behind the head start. A token counts as often as it was trained; prompts do not count, and steps
    that were skipped take time. `bench pipeline` also leaves out tokens that were generated before the steps that it
    times.
    """
    trained = numbers(rows, "trained_tokens")
    return rate(sum(trained) if trained else None, sum(numbers(rows, "step_s")))


def seconds_by_part(row: Row) -> dict[str, float]:
    """Seconds of each part of the step, "other" included."""
    parts = {key.removesuffix("_s"): number(row, key) or 0.0 for key in TIME_KEYS}
    parts["other"] = max(0.0, (number(row, "step_s") or 0.0) - sum(parts.values()))
    return parts
