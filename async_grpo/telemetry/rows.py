"""The rows that a run writes: the one place that names their keys.

    metrics.jsonl     rows of a step (metrics.METRICS) | ProbeRow | WarningRow, told apart by `kind`
    samples/*.jsonl   SampleRow

Readers tolerate missing keys: a file may come from an older version or from a run cut short.
A resumed run repeats steps; the last row of a step is the one that counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

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


class ProbeRow(TypedDict, total=False):
    """Log-probability gap on groups whose every token comes from `version`."""

    kind: str
    version: int
    logprob_gap_mean: float
    logprob_gap_max: float
    gap_tokens: int


class WarningRow(TypedDict, total=False):
    """Something that a person should look at."""

    kind: str
    step: int
    message: str


class CompletionRow(TypedDict, total=False):
    """One completion; `spans` are [version, start, end) over its tokens."""

    text: str
    reward: float | None
    spans: list[list[int]]


class SampleRow(TypedDict, total=False):
    """One finished group, for reading."""

    prompt: str
    answer: str
    completions: list[CompletionRow]


def last_of_each(rows: Iterable[Row], key: str) -> list[Row]:
    """One row per value of `key` (the last one written), in order of `key`; rows without it are left out."""
    latest = {row[key]: row for row in rows if isinstance(row.get(key), int)}
    return [latest[value] for value in sorted(latest)]


def of_kind(rows: Iterable[Row], kind: str) -> list[Row]:
    """The rows of one kind, in file order."""
    return [row for row in rows if row.get("kind") == kind]


def number(row: Row, key: str) -> float | None:
    """A numeric field, or None where it is missing or null."""
    value = row.get(key)
    return float(value) if isinstance(value, (int, float)) else None


def numbers(rows: Sequence[Row], key: str) -> list[float]:
    """A numeric field of every row that has it."""
    return [value for row in rows if (value := number(row, key)) is not None]


def mean(values: Sequence[float]) -> float | None:
    """The mean of the values, None if there are none."""
    return sum(values) / len(values) if values else None


def rate(amount: float | None, spent_s: float) -> float | None:
    """The amount per second; None if the amount is not known or no time was spent."""
    return amount / spent_s if amount is not None and spent_s > 0 else None


def seconds_by_part(row: Row) -> dict[str, float]:
    """Part of the step -> seconds, "other" included."""
    parts = {key.removesuffix("_s"): number(row, key) or 0.0 for key in TIME_KEYS}
    parts["other"] = max(0.0, (number(row, "step_s") or 0.0) - sum(parts.values()))
    return parts
