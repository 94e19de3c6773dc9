"""From prompts to a mean and its interval.

Completions of one prompt are alike, so prompts are what is drawn: a resample takes as many prompts as there are, with
replacement, each with all of its completions (the cluster bootstrap), and the interval spans the 2.5th to the 97.5th
percentile of the means of RESAMPLES resamples. The generator is seeded: the same grades give the same interval.

If all prompts have the same value, all resamples have it too: the interval is that value alone, and it says
nothing about what is rarer than about 3 in the number of prompts.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from async_grpo.wire.board import Estimate

RESAMPLES = 2000
LEVEL = 0.95
_SEED = 0
_DRAWS_AT_ONCE = 1 << 20

Matrix = npt.NDArray[np.float64]


def estimates(totals_PF: Matrix, counts_PF: Matrix) -> list[Estimate | None]:
    """Of F figures over P prompts: sum(totals) / sum(counts), with its interval; None where nothing was counted.

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
