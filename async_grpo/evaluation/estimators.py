"""Estimates from graded completions: pass@k and maj@k of one prompt, a mean over prompts and its interval.

Completions of one prompt are alike, so the bootstrap draws prompts: a resample takes as many prompts as there are, with
replacement, each with all of its completions (the cluster bootstrap). The interval spans the 2.5th to the 97.5th
percentile of the means of RESAMPLES resamples. The generator is seeded: the same grades give the same interval.

If all prompts have the same value, so have all resamples. The interval is then that value alone, and it says nothing
about what is rarer than about 3 in the number of prompts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from async_grpo.wire.board import Estimate

RESAMPLES = 2000
LEVEL = 0.95
_SEED = 0
_DRAWS_AT_ONCE = 1 << 20

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class GradedAnswer:
    """One completion: its score (None if it could not be judged) and its answer.

    The answer is None if the completion gives none, or if extracting it failed (`unextracted`). `failed`: the workflow
    made no completion, so there is neither score nor answer.
    """

    score: float | None
    answer: str | None = None
    unextracted: bool = False
    failed: bool = False


@dataclass(frozen=True, slots=True)
class GradedPrompt:
    """All completions of one held-out prompt. `source` says where the prompt is from, "" if the data do not."""

    sampled: Sequence[GradedAnswer]
    greedy: Sequence[GradedAnswer] = ()
    source: str = ""


def pass_at(k: int, *, made: int, right: int) -> float:
    """The probability that at least one of k completions is right: 1 - C(made - right, k) / C(made, k).

    Unbiased (arXiv 2107.03374, equation 1): the share of the subsets of size k that hold a right one. Needs
    1 <= k <= made and 0 <= right <= made.

    >>> [pass_at(k, made=4, right=1) for k in (1, 2, 4)]
    [0.25, 0.5, 1.0]
    """
    if not (1 <= k <= made and 0 <= right <= made):
        raise ValueError(f"pass@{k} of {made} completions, {right} of them right, is not defined: 1 <= k <= made")
    return 1.0 - math.comb(made - right, k) / math.comb(made, k)


def majority(grades: Sequence[GradedAnswer], *, right_at: float) -> float:
    """How right the answer is that most completions give; 0 if none gives one.

    Votes are cast by completions that were judged and give an answer. Of several answers with the most votes one is
    taken at random, so the value is the mean over them; an answer is as right as the mean over its voters.

    >>> majority([GradedAnswer(1.0, "4"), GradedAnswer(1.0, "4"), GradedAnswer(0.0, "5")], right_at=1.0)
    1.0
    >>> majority([GradedAnswer(1.0, "4"), GradedAnswer(0.0, "5"), GradedAnswer(0.0, None)], right_at=1.0)
    0.5
    """
    votes = [(grade.answer, grade.score >= right_at) for grade in grades if grade.score is not None and grade.answer]
    if not votes:
        return 0.0
    counts = Counter(answer for answer, _ in votes)
    most = max(counts.values())
    winners = [answer for answer, count in counts.items() if count == most]
    return math.fsum(right for answer, right in votes if answer in winners) / (most * len(winners))


def k_values(samples: int) -> list[int]:
    """The k for which pass@k is reported: powers of two below `samples`, and `samples`.

    >>> [k_values(samples) for samples in (1, 4, 6)]
    [[1], [1, 2, 4], [1, 2, 4, 6]]
    """
    return [1 << power for power in range(samples.bit_length()) if 1 << power < samples] + [samples]


def estimates(totals_PF: Matrix, counts_PF: Matrix) -> list[Estimate | None]:
    """sum(totals) / sum(counts) of F figures over P prompts, with its interval; None where nothing was counted.

    Prompt p adds `totals[p, f]` over `counts[p, f]` observations to figure f. All figures see the same resamples.
    """
    values = [
        _ratio(math.fsum(totals), math.fsum(counts)) for totals, counts in zip(totals_PF.T, counts_PF.T, strict=True)
    ]
    if all(value is None for value in values):
        return [None] * len(values)
    ratios_RF = _resampled(totals_PF, counts_PF)
    low, high = (1.0 - LEVEL) / 2, (1.0 + LEVEL) / 2
    return [
        None if value is None else Estimate(value, *(float(edge) for edge in np.nanquantile(ratios_R, (low, high))))
        for value, ratios_R in zip(values, ratios_RF.T, strict=True)
    ]


def _resampled(totals_PF: Matrix, counts_PF: Matrix) -> Matrix:
    """Every figure of every resample; nan where a resample has counted nothing."""
    prompts = len(totals_PF)
    generator = np.random.default_rng(_SEED)
    at_once = max(1, min(RESAMPLES, _DRAWS_AT_ONCE // prompts))
    parts = []
    for first in range(0, RESAMPLES, at_once):
        size = min(at_once, RESAMPLES - first)
        drawn_RP = generator.integers(prompts, size=(size, prompts)) + prompts * np.arange(size)[:, None]
        times_RP = np.bincount(drawn_RP.ravel(), minlength=size * prompts).reshape(size, prompts).astype(np.float64)
        with np.errstate(invalid="ignore"):
            parts.append((times_RP @ totals_PF) / (times_RP @ counts_PF))
    return np.concatenate(parts)


def _ratio(total: float, count: float) -> float | None:
    return total / count if count else None
