"""All figures of an evaluation, overall and by source, and their text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from async_grpo.evaluation.estimators import (
    LEVEL,
    RESAMPLES,
    GradedAnswer,
    GradedPrompt,
    estimates,
    k_values,
    majority,
    pass_at,
)
from async_grpo.wire.board import Estimate, EvalMetrics

MOST_SOURCES = 16
OTHERS = "(others)"
INTERVALS = (
    f"{LEVEL:.0%} intervals over prompts: percentile bootstrap, {RESAMPLES:,} seeded resamples, "
    "each of whole prompts with all their completions"
)

Observation = tuple[float, float]
"""A prompt's total and count of one figure."""
_NOTHING: Observation = (0.0, 0.0)


def eval_metrics(prompts: Sequence[GradedPrompt], *, samples: int, right_at: float, votes: bool) -> EvalMetrics:
    """Mean score, pass@k, maj@k (if there are `votes`: the reward function gives answers) and greedy score.

    `samples`: completions asked of each prompt. Completions that could not be judged, or whose workflow failed, are
    left out; a prompt with fewer than k judged completions is left out of pass@k, one without any of all figures.
    """
    ks = k_values(samples)
    columns = [
        [_scores(prompt.sampled) for prompt in prompts],
        [_scores(prompt.greedy) for prompt in prompts],
        [_majority(prompt, right_at) if votes else _NOTHING for prompt in prompts],
        *[[_pass_at(k, prompt, right_at) for prompt in prompts] for k in ks],
    ]
    table_PF2 = np.array(columns, np.float64).reshape(len(columns), len(prompts), 2).transpose(1, 0, 2)
    mean, greedy, most, *passes = estimates(table_PF2[:, :, 0], table_PF2[:, :, 1])
    judged = [_judged(prompt.sampled) for prompt in prompts]
    made = sum(not grade.failed for prompt in prompts for grade in prompt.sampled)
    return EvalMetrics(
        prompts=sum(count > 0 for count in judged),
        completions=sum(judged),
        unjudged=made - sum(judged),
        unextracted=sum(grade.unextracted for prompt in prompts for grade in prompt.sampled),
        mean=mean,
        pass_at={str(k): passed for k, passed in zip(ks, passes, strict=True) if passed is not None},
        majority=most,
        greedy=greedy,
        failed=sum(grade.failed for prompt in prompts for grade in (*prompt.sampled, *prompt.greedy)),
    )


def metrics_by_source(
    prompts: Sequence[GradedPrompt], *, samples: int, right_at: float, votes: bool
) -> dict[str, EvalMetrics]:
    """`eval_metrics` of every source, if there are several. Beyond MOST_SOURCES the smallest count as one, OTHERS."""
    sizes = Counter(prompt.source for prompt in prompts)
    if len(sizes) < 2:
        return {}
    shown = {
        source for source, _ in sizes.most_common(MOST_SOURCES if len(sizes) <= MOST_SOURCES else MOST_SOURCES - 1)
    }
    parts: dict[str, list[GradedPrompt]] = {}
    for prompt in prompts:
        parts.setdefault(prompt.source if prompt.source in shown else OTHERS, []).append(prompt)
    return {
        source: eval_metrics(parts[source], samples=samples, right_at=right_at, votes=votes) for source in sorted(parts)
    }


def rows_of(figures: EvalMetrics, samples: int) -> dict[str, Estimate]:
    """Estimates by name, in the order of a report. Absent figures have no row."""
    rows = {
        f"mean@{samples}": figures.mean,
        **{f"pass@{k}": estimate for k, estimate in figures.pass_at.items()},
        f"maj@{samples}": figures.majority,
        "greedy": figures.greedy,
    }
    return {name: estimate for name, estimate in rows.items() if estimate is not None}


def no_vote(unextracted: int, samples: int) -> str:
    """A sentence for the number of completions whose answer could not be extracted.

    >>> no_vote(3, 8)
    'In 3 completions the reward function failed to find the answer (`extract`): they have no vote in maj@8'
    """
    return (
        f"In {unextracted} completions the reward function failed to find the answer (`extract`): they have no vote in "
        f"maj@{samples}"
    )


def left_out(failed: int) -> str:
    """A sentence for the number of completions whose workflow failed.

    >>> left_out(3)
    'The workflow failed in 3 completions, which are left out of all figures'
    """
    return f"The workflow failed in {failed} completions, which are left out of all figures"


def shown(estimate: Estimate | None) -> str:
    """The value with its interval, as text.

    >>> shown(Estimate(0.957, 0.945, 0.9688))
    '0.957 [0.945, 0.969]'
    """
    return "-" if estimate is None else f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _scores(grades: Sequence[GradedAnswer]) -> Observation:
    scores = [grade.score for grade in grades if grade.score is not None]
    return math.fsum(scores), float(len(scores))


def _majority(prompt: GradedPrompt, right_at: float) -> Observation:
    return (majority(prompt.sampled, right_at=right_at), 1.0) if _judged(prompt.sampled) else _NOTHING


def _pass_at(k: int, prompt: GradedPrompt, right_at: float) -> Observation:
    made = _judged(prompt.sampled)
    right = sum(grade.score is not None and grade.score >= right_at for grade in prompt.sampled)
    return (pass_at(k, made=made, right=right), 1.0) if made >= k else _NOTHING


def _judged(grades: Sequence[GradedAnswer]) -> int:
    return sum(grade.score is not None for grade in grades)
