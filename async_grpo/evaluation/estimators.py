"""Estimates from the completions of one prompt."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from async_grpo.evaluation.grades import Grade


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


def majority(grades: Sequence[Grade], *, right_at: float) -> float:
    """How right the answer is that most completions give; 0 if none gives one.

    Votes are cast by completions that were judged and give an answer. Of several answers with the most votes one is
    taken at random, so the value is the mean over them; an answer is as right as the mean over its voters.

    >>> majority([Grade(1.0, "4"), Grade(1.0, "4"), Grade(0.0, "5")], right_at=1.0)
    1.0
    >>> majority([Grade(1.0, "4"), Grade(0.0, "5"), Grade(0.0, None)], right_at=1.0)
    0.5
    """
    votes = [(grade.answer, grade.score >= right_at) for grade in grades if grade.score is not None and grade.answer]
    if not votes:
        return 0.0
    counts = Counter(answer for answer, _ in votes)
    most = max(counts.values())
    winners = [answer for answer, count in counts.items() if count == most]
    return math.fsum(right for answer, right in votes if answer in winners) / (most * len(winners))


def ladder(samples: int) -> list[int]:
    """The k for which pass@k is reported: powers of two below `samples`, and `samples`.

    >>> [ladder(samples) for samples in (1, 4, 6)]
    [[1], [1, 2, 4], [1, 2, 4, 6]]
    """
    return [1 << power for power in range(samples.bit_length()) if 1 << power < samples] + [samples]
