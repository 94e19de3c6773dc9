"""The judgement of one completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Failure = Literal["", "deadline", "crash", "error"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Scores by verifier name and their weighted sum, or why there is none.

    failure: "" (judged), "deadline" (killed), "crash" (the process ended), "error" (an exception).
    """

    scores: dict[str, float] = field(default_factory=dict)
    reward: float | None = None
    failure: Failure = ""
    reason: str = ""


def weighted_sum(scores: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """sum of weight * score over all verifiers."""
    return sum(weight * scores[name] for name, weight in weights.items())


def unverifiable(failure: Failure, reason: str) -> Verdict:
    """No judgement: the sample is masked, never scored 0."""
    return Verdict(failure=failure, reason=reason)
