"""What becomes of samples that ran out of tokens: nothing, a mask, or a punishment.

Both rules are those of DAPO (arXiv 2503.14476, section 3.4).

A completion that was cut at `max_tokens` is wrong for want of room and not of reasoning. `filter` keeps it out
of the loss. `soft` tells the policy before it gets there: with L = soft_overlong_tokens,

    punishment(n) = 0                           n <= max_tokens - L
                  = factor * ((max_tokens - L) - n) / L     above, down to -factor at max_tokens
"""

from __future__ import annotations

import dataclasses

from async_grpo.config.rewards import OVERLONG, RewardsConfig
from async_grpo.rewards.verdict import Verdict, unverifiable

CUT = "length"
"""Finish reason of a completion that reached max_tokens."""


def with_length(verdict: Verdict, rule: RewardsConfig, *, length: int, finish_reason: str, max_tokens: int) -> Verdict:
    """The verdict on a completion of `length` tokens once the rule for length is applied.

    A sample that is unverifiable already stays so, for its own reason.
    """
    if verdict.reward is None or rule.overlong == "none":
        return verdict
    if rule.overlong == "filter":
        return _masked(verdict, max_tokens) if finish_reason == CUT else verdict
    assert rule.soft_overlong_tokens is not None
    punishment = soft_punishment(
        length, max_tokens=max_tokens, last=rule.soft_overlong_tokens, factor=rule.soft_overlong_factor
    )
    scores = {**verdict.scores, OVERLONG: punishment}
    return dataclasses.replace(verdict, scores=scores, reward=verdict.reward + punishment)


def soft_punishment(length: int, *, max_tokens: int, last: int, factor: float) -> float:
    """0 up to max_tokens - last, then linearly down to -factor at max_tokens (and no further).

    >>> [soft_punishment(n, max_tokens=100, last=20, factor=1.0) for n in (80, 90, 100, 120)]
    [0.0, -0.5, -1.0, -1.0]
    """
    exceed = min(max(0, length - (max_tokens - last)), last)
    return 0.0 if exceed == 0 else -factor * exceed / last


def _masked(verdict: Verdict, max_tokens: int) -> Verdict:
    cut = unverifiable(
        "overlong", f"the completion was cut at {max_tokens} tokens. Raise sampling.max_tokens", name=OVERLONG
    )
    return dataclasses.replace(cut, scores=verdict.scores, failures={**verdict.failures, **cut.failures})
