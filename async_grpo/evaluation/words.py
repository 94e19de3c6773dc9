"""The figures as text."""

from __future__ import annotations

from async_grpo.evaluation.bootstrap import LEVEL, RESAMPLES
from async_grpo.wire.board import Estimate, Figures

INTERVALS = (
    f"{LEVEL:.0%} intervals over prompts: percentile bootstrap, {RESAMPLES:,} seeded resamples, "
    "each of whole prompts with all their completions"
)


def rows_of(figures: Figures, samples: int) -> dict[str, Estimate]:
    """Name -> estimate, in the order of a report; what is absent has no row."""
    rows = {
        f"mean@{samples}": figures.mean,
        **{f"pass@{k}": estimate for k, estimate in figures.pass_at.items()},
        f"maj@{samples}": figures.majority,
        "greedy": figures.greedy,
    }
    return {name: estimate for name, estimate in rows.items() if estimate is not None}


def no_vote(unextracted: int, samples: int) -> str:
    """What it means that looking for the answer failed in so many completions.

    >>> no_vote(3, 8)
    'In 3 completions the reward function failed to find the answer (`extract`): they have no vote in maj@8'
    """
    return (
        f"In {unextracted} completions the reward function failed to find the answer (`extract`): they have no vote in "
        f"maj@{samples}"
    )


def shown(estimate: Estimate | None) -> str:
    """Value and interval.

    >>> shown(Estimate(0.957, 0.945, 0.9688))
    '0.957 [0.945, 0.969]'
    """
    return "-" if estimate is None else f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
