"""Rows that a run writes, and functions that read them.

    metrics.jsonl     kind "step"      the keys of `metrics.METRICS`
                      kind "probe"     version, logprob_gap_mean, logprob_gap_max, gap_tokens: the gap on groups whose
                                       every token comes from `version`
                      kind "staleness" step, staleness_before, staleness, reason: the effective S changed
                      kind "warning"   step, message: a problem that needs a person's attention
    samples/*.jsonl   one finished group: prompt, answer, completions with text, reward and spans, which are
                      [version, start, end) over the completion's tokens; for each token its text (pieces) and its
                      log-probability under the policy that sampled it (logprobs, 4 digits)
    trained.jsonl     one step: its number, and the advantages of those of its groups that are in samples/*.jsonl

Readers tolerate missing keys: a file may be from an older release or from an interrupted run. A resumed run repeats
steps; the last row of a step is valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from async_grpo.telemetry.metrics import PHASES

Row = Mapping[str, Any]
Facts = dict[str, Any]
"""Key -> JSON value of a summary; None for an unknown value."""

GENERATED_TOKENS = "generated_tokens"
"""Counter of the run board: completion tokens sampled by all rollout servers."""
RESTARTS_PREFIX = "restarts."
"""Counters of the run board: `restarts.<role>`."""
REWARD_FAILURES_PREFIX = "reward_failures."
"""Counters of the run board: `reward_failures.<kind>`, completions that a verifier could not judge."""

TIME_KEYS = tuple(f"{phase}_s" for phase in PHASES)
"""Parts of a step, in order. The rest of `step_s` is "other"."""


def is_sampled(seq: int, every: int) -> bool:
    """True if the group is written to samples/*.jsonl: one in `every` (telemetry.samples_every).

    Decided by the sequence number, so that server and trainer write about the same groups.
    """
    return seq % every == 0


def latest_rows(rows: Iterable[Row], key: str) -> list[Row]:
    """Return the last row for each value of `key`, in order of `key`. Rows without the key are omitted."""
    latest = {row[key]: row for row in rows if isinstance(row.get(key), int)}
    return [latest[value] for value in sorted(latest)]


def rows_of_kind(rows: Iterable[Row], kind: str) -> list[Row]:
    """Return the rows of one kind, in file order."""
    return [row for row in rows if row.get("kind") == kind]


def number(row: Row, key: str) -> float | None:
    """Return a numeric field; None if it is missing or null."""
    value = row.get(key)
    return float(value) if isinstance(value, (int, float)) else None


def numbers(rows: Sequence[Row], key: str) -> list[float]:
    """Return the values of a numeric field, from all rows that have it."""
    values = []
    for row in rows:
        value = number(row, key)
        if value is not None:
            values.append(value)
    return values


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None without values."""
    return sum(values) / len(values) if values else None


def rate(amount: float | None, elapsed_s: float) -> float | None:
    """Return the amount per second; None if the amount is unknown or no time has passed."""
    return amount / elapsed_s if amount is not None and elapsed_s > 0 else None


def count_warmup_steps(steps: int, max_staleness: int) -> int:
    """Return the number of steps that rates exclude: the first S + 1, or the first half if that is less."""
    return min(max_staleness + 1, steps // 2)


def steady_steps(rows: Sequence[Row], max_staleness: int) -> Sequence[Row]:
    """Return the step rows after the warm-up.

    The first S + 1 steps train groups that were generated while the trainer waited for its first batch, and no step
    includes that wait. With them a run would look faster than it is, the more so the larger its window.
    """
    return rows[count_warmup_steps(len(rows), max_staleness) :]


def tokens_per_s(rows: Sequence[Row]) -> float | None:
    """Return the throughput of a run: trained tokens per second of the trainer's steps, waits included; None if
    unknown.

    All displays use it: the terminal for the last step, plots for each step, and reports, sweeps and lists of runs for
    the steady steps. A token counts once per training; prompts do not count, and skipped steps count with their time.
    `bench pipeline` also excludes tokens that were generated before the steps that it measures.
    """
    trained = numbers(rows, "trained_tokens")
    return rate(sum(trained) if trained else None, sum(numbers(rows, "step_s")))


def seconds_by_part(row: Row) -> dict[str, float]:
    """Return the seconds of each part of the step, including "other"."""
    parts = {key.removesuffix("_s"): number(row, key) or 0.0 for key in TIME_KEYS}
    parts["other"] = max(0.0, (number(row, "step_s") or 0.0) - sum(parts.values()))
    return parts
