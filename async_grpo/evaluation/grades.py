"""What is known of the completions of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grade:
    """One completion: its score, None if it could not be judged, and the answer in it, None if it gives none, or if
    looking for it failed (`unextracted`)."""

    score: float | None
    answer: str | None = None
    unextracted: bool = False


@dataclass(frozen=True, slots=True)
class GradedPrompt:
    """All completions of one held-out prompt. `source` says where the prompt is from, "" if the data do not."""

    sampled: Sequence[Grade]
    greedy: Sequence[Grade] = ()
    source: str = ""
