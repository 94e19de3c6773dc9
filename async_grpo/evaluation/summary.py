"""Metrics of an evaluation, overall and by source, and their text."""

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
    estimate_ratios,
    k_values,
    majority_score,
    pass_at,
)
from async_grpo.wire.board import Estimate, EvalMetrics

MAX_SOURCES = 16
OTHERS = "(others)"
INTERVALS = (
    f"{LEVEL:.0%} intervals over prompts: percentile bootstrap, {RESAMPLES:,} seeded resamples, "
    "each of whole prompts with all their completions"
)

Observation = tuple[float, float]
"""Total and count that one prompt adds to one metric."""
_NO_OBSERVATION: Observation = (0.0, 0.0)


def compute_metrics(prompts: Sequence[GradedPrompt], *, samples: int, right_at: float, votes: bool) -> EvalMetrics:
    """Compute mean score, pass@k, maj@k and greedy score.

    `samples`: completions planned per prompt. `votes`: True if the reward function extracts answers, which maj@k needs.
    Completions that could not be judged, or whose workflow failed, are left out. A prompt with fewer than k judged
    completions is left out of pass@k, and a prompt without any of all metrics.
    """
    ks = k_values(samples)
    columns = [
        [_score_observation(prompt.sampled) for prompt in prompts],
        [_score_observation(prompt.greedy) for prompt in prompts],
        [_majority_observation(prompt, right_at) if votes else _NO_OBSERVATION for prompt in prompts],
        *[[_pass_observation(k, prompt, right_at) for prompt in prompts] for k in ks],
    ]
    table_PF2 = np.array(columns, np.float64).reshape(len(columns), len(prompts), 2).transpose(1, 0, 2)
    mean, greedy, majority, *passes = estimate_ratios(table_PF2[:, :, 0], table_PF2[:, :, 1])

    judged = [_count_judged(prompt.sampled) for prompt in prompts]
    made = sum(not grade.failed for prompt in prompts for grade in prompt.sampled)
    return EvalMetrics(
        prompts=sum(count > 0 for count in judged),
        completions=sum(judged),
        unjudged=made - sum(judged),
        unextracted=sum(grade.unextracted for prompt in prompts for grade in prompt.sampled),
        mean=mean,
        pass_at={str(k): estimate for k, estimate in zip(ks, passes, strict=True) if estimate is not None},
        majority=majority,
        greedy=greedy,
        failed=sum(grade.failed for prompt in prompts for grade in (*prompt.sampled, *prompt.greedy)),
    )


def compute_metrics_by_source(
    prompts: Sequence[GradedPrompt], *, samples: int, right_at: float, votes: bool
) -> dict[str, EvalMetrics]:
    """Compute the metrics of each source; empty if there is only one.

    With more than MAX_SOURCES sources, the smallest are combined as OTHERS.
    """
    sizes = Counter(prompt.source for prompt in prompts)
    if len(sizes) < 2:
        return {}

    named = MAX_SOURCES if len(sizes) <= MAX_SOURCES else MAX_SOURCES - 1
    named_sources = {source for source, _ in sizes.most_common(named)}
    parts: dict[str, list[GradedPrompt]] = {}
    for prompt in prompts:
        source = prompt.source if prompt.source in named_sources else OTHERS
        parts.setdefault(source, []).append(prompt)
    return {
        source: compute_metrics(parts[source], samples=samples, right_at=right_at, votes=votes)
        for source in sorted(parts)
    }


def estimates_by_name(metrics: EvalMetrics, samples: int) -> dict[str, Estimate]:
    """Estimates by name, in the order of a report. Missing ones are left out."""
    estimates = {
        f"mean@{samples}": metrics.mean,
        **{f"pass@{k}": estimate for k, estimate in metrics.pass_at.items()},
        f"maj@{samples}": metrics.majority,
        "greedy": metrics.greedy,
    }
    return {name: estimate for name, estimate in estimates.items() if estimate is not None}


def describe_unextracted(unextracted: int, samples: int) -> str:
    """Sentence for the number of completions whose answer could not be extracted.

    >>> describe_unextracted(3, 8)
    'In 3 completions the reward function failed to extract the answer (`extract`): they have no vote in maj@8'
    """
    return (
        f"In {unextracted} completions the reward function failed to extract the answer (`extract`): they have no vote "
        f"in maj@{samples}"
    )


def describe_failed(failed: int) -> str:
    """Sentence for the number of completions whose workflow failed.

    >>> describe_failed(3)
    'The workflow failed in 3 completions, which are left out of all metrics'
    """
    return f"The workflow failed in {failed} completions, which are left out of all metrics"


def format_estimate(estimate: Estimate | None) -> str:
    """The value with its interval, as text.

    >>> format_estimate(Estimate(0.957, 0.945, 0.9688))
    '0.957 [0.945, 0.969]'
    """
    return "-" if estimate is None else f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _score_observation(grades: Sequence[GradedAnswer]) -> Observation:
    scores = [grade.score for grade in grades if grade.score is not None]
    return math.fsum(scores), float(len(scores))


def _majority_observation(prompt: GradedPrompt, right_at: float) -> Observation:
    if not _count_judged(prompt.sampled):
        return _NO_OBSERVATION
    return majority_score(prompt.sampled, right_at=right_at), 1.0


def _pass_observation(k: int, prompt: GradedPrompt, right_at: float) -> Observation:
    judged = _count_judged(prompt.sampled)
    if judged < k:
        return _NO_OBSERVATION
    right = sum(grade.score is not None and grade.score >= right_at for grade in prompt.sampled)
    return pass_at(k, made=judged, right=right), 1.0


def _count_judged(grades: Sequence[GradedAnswer]) -> int:
    return sum(grade.score is not None for grade in grades)
