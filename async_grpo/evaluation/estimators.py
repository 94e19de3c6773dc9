"""Estimators for graded completions: pass@k and maj@k of one prompt, a mean over prompts and its interval.

Completions of one prompt are correlated, so the bootstrap draws prompts (cluster bootstrap): a resample draws as many
prompts as there are, with replacement, each with all of its completions. The interval spans the 2.5th to the 97.5th
percentile of the means of RESAMPLES resamples. The generator is seeded: the same grades give the same interval.

If all prompts have the same value, so have all resamples. The interval is then that value alone, and says nothing about
outcomes rarer than about 3 / number of prompts.
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
_MAX_DRAWS_PER_PART = 1 << 20
"""Bounds the memory of the bootstrap."""

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class GradedAnswer:
    """One completion: its score (None if it could not be judged) and its answer.

    The answer is None if the completion has none, or if its extraction failed (`unextracted`). `failed`: the workflow
    returned no completion, so there is neither score nor answer.
    """

    score: float | None
    answer: str | None = None
    unextracted: bool = False
    failed: bool = False


@dataclass(frozen=True, slots=True)
class GradedPrompt:
    """All completions of one held-out prompt. `source`: name of its data source, "" if the data have none."""

    sampled: Sequence[GradedAnswer]
    greedy: Sequence[GradedAnswer] = ()
    source: str = ""


def pass_at(k: int, *, made: int, right: int) -> float:
    """Probability that at least one of k completions is right: 1 - C(made - right, k) / C(made, k).

    Unbiased (arXiv 2107.03374, equation 1): the fraction of subsets of size k with a right completion. Requires
    1 <= k <= made and 0 <= right <= made.

    >>> [pass_at(k, made=4, right=1) for k in (1, 2, 4)]
    [0.25, 0.5, 1.0]
    """
    if not (1 <= k <= made and 0 <= right <= made):
        raise ValueError(f"pass@{k} of {made} completions, {right} of them right, is not defined: 1 <= k <= made")
    return 1.0 - math.comb(made - right, k) / math.comb(made, k)


def majority_score(grades: Sequence[GradedAnswer], *, right_at: float) -> float:
    """Score of the answer with the most votes (maj@k); 0 without any vote.

    Completions that were judged and have an answer vote. The score of an answer is the fraction of its voters whose
    score is at least `right_at`. If several answers have the most votes, one is chosen at random, so the result is
    their mean.

    >>> majority_score([GradedAnswer(1.0, "4"), GradedAnswer(1.0, "4"), GradedAnswer(0.0, "5")], right_at=1.0)
    1.0
    >>> majority_score([GradedAnswer(1.0, "4"), GradedAnswer(0.0, "5"), GradedAnswer(0.0, None)], right_at=1.0)
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
    """Values of k for which pass@k is reported: powers of two below `samples`, and `samples`.

    >>> [k_values(samples) for samples in (1, 4, 6)]
    [[1], [1, 2, 4], [1, 2, 4, 6]]
    """
    return [1 << power for power in range(samples.bit_length()) if 1 << power < samples] + [samples]


def estimate_ratios(totals_PF: Matrix, counts_PF: Matrix) -> list[Estimate | None]:
    """sum(totals) / sum(counts) of F metrics over P prompts, each with its interval; None where all counts are 0.

    Prompt p adds `totals[p, f]` over `counts[p, f]` observations to metric f. All metrics use the same resamples.
    """
    values = [
        _ratio(math.fsum(totals), math.fsum(counts)) for totals, counts in zip(totals_PF.T, counts_PF.T, strict=True)
    ]
    if all(value is None for value in values):
        return [None] * len(values)

    ratios_RF = _resample_ratios(totals_PF, counts_PF)
    edges = ((1.0 - LEVEL) / 2, (1.0 + LEVEL) / 2)
    estimates: list[Estimate | None] = []
    for value, ratios_R in zip(values, ratios_RF.T, strict=True):
        if value is None:
            estimates.append(None)
            continue
        # nanquantile: a resample may have drawn only prompts that do not count for this metric.
        low, high = np.nanquantile(ratios_R, edges)
        estimates.append(Estimate(value, float(low), float(high)))
    return estimates


def _resample_ratios(totals_PF: Matrix, counts_PF: Matrix) -> Matrix:
    """Ratio of each metric in each resample, [R, F]; nan where the counts of the resample are 0."""
    prompts = len(totals_PF)
    generator = np.random.default_rng(_SEED)
    part_size = max(1, min(RESAMPLES, _MAX_DRAWS_PER_PART // prompts))
    parts = []
    for first in range(0, RESAMPLES, part_size):
        size = min(part_size, RESAMPLES - first)
        # Row r draws from [r * prompts, (r + 1) * prompts), so that one bincount counts the draws of all rows.
        drawn_RP = generator.integers(prompts, size=(size, prompts)) + prompts * np.arange(size)[:, None]
        times_RP = np.bincount(drawn_RP.ravel(), minlength=size * prompts).reshape(size, prompts).astype(np.float64)
        with np.errstate(invalid="ignore"):
            parts.append((times_RP @ totals_PF) / (times_RP @ counts_PF))
    return np.concatenate(parts)


def _ratio(total: float, count: float) -> float | None:
    return total / count if count else None
