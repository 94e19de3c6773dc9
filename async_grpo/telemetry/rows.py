"""The rows that a run writes: the one place that names their keys.

    metrics.jsonl     StepRow | ProbeRow | WarningRow, told apart by `kind`
    samples/*.jsonl   SampleRow

Readers tolerate missing keys: a file may come from an older version or from a run cut short.
A resumed run repeats steps; the last row of a step is the one that counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

Row = Mapping[str, Any]

GENERATED_TOKENS = "generated_tokens"
"""Counter of the run board: completion tokens sampled by all rollout servers."""
RESTARTS_PREFIX = "restarts."
"""Counters of the run board: `restarts.<role>`."""
REWARD_FAILURES_PREFIX = "reward_failures."
"""Counters of the run board: `reward_failures.<kind>`, completions that a verifier could not judge."""

TIME_KEYS = (
    *("wait_s", "pack_s", "prox_s", "reference_s", "train_s", "optimizer_s"),
    *("publish_s", "checkpoint_s"),
)
"""The parts of a step, in order; what they leave of `step_s` is "other"."""


class StepRow(TypedDict, total=False):
    """One optimizer step, `version` -> `version + 1`. Times in seconds; ages in optimizer steps."""

    kind: str
    step: int
    version: int
    epoch: int
    time_s: float
    reward_mean: float
    reward_std: float
    loss: float
    grad_norm: float
    lr: float
    clip_fraction: float
    clip_low_fraction: float
    clip_high_fraction: float
    rejected_fraction: float
    """Share of the trained tokens that a correction multiplies by 0."""
    lr_scale: float
    """What `lr` was multiplied by."""
    entropy: float
    """Mean over the trained tokens; only with an entropy bonus."""
    kl: float
    """Mean divergence from the reference model over the trained tokens; only with one."""
    advantage_mean: float
    advantage_std: float
    updates: int
    """Optimizer updates of the step."""
    skipped_steps: int
    """1 if the step was skipped because its loss or gradient was not finite; most other keys are then missing."""
    overlong_samples: int
    """Truncated or dropped because they fit no micro-batch."""
    weight_mean: float
    weight_max: float
    ess: float
    age_mean: float
    age_max: int
    age_histogram: dict[str, int]
    """Age -> trained tokens."""
    trained_tokens: int
    completion_tokens_mean: float
    logprob_gap_mean: float
    """Mean |trainer - engine| log-probability over completions that the trainer's present version sampled whole."""
    logprob_gap_max: float
    gap_tokens: int
    packing_efficiency: float
    rank_balance: float
    """Mean work of a data-parallel rank / that of the busiest."""
    read_tokens: int
    tokens_per_s: float
    """read_tokens over the seconds of pack, prox, reference, train and optimizer."""
    mfu: float
    """model_flops over those seconds and the peak of all devices; only where that is known."""
    model_flops: float
    groups: int
    replayed: bool
    wait_s: float
    start_s: float
    """Until the first batch of this process, while engines load; not part of step_s."""
    pack_s: float
    prox_s: float
    reference_s: float
    train_s: float
    optimizer_s: float
    publish_s: float
    checkpoint_s: float
    step_s: float


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


def seconds_by_part(row: Row) -> dict[str, float]:
    """Part of the step -> seconds, "other" included."""
    parts = {key.removesuffix("_s"): number(row, key) or 0.0 for key in TIME_KEYS}
    parts["other"] = max(0.0, (number(row, "step_s") or 0.0) - sum(parts.values()))
    return parts
