"""The judgement of one completion: scores by reward, what failed, and the one number that is trained on.

What a reward may look at.

What becomes of samples that ran out of tokens: nothing, a mask, or a punishment.

Both rules are those of DAPO (arXiv 2503.14476, section 3.4).

A completion that was cut at `max_tokens` is wrong for want of room and not of reasoning. `filter` keeps it out
of the loss. `soft` tells the policy before it gets there: with L = soft_overlong_tokens,

    punishment(n) = 0                           n <= max_tokens - L
                  = factor * ((max_tokens - L) - n) / L     above, down to -factor at max_tokens

What counts as a score.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

from async_grpo.config.rewards import OVERLONG, RewardConfig, RewardsConfig

if TYPE_CHECKING:
    from async_grpo.wire import Sample, Task


class RewardInput(NamedTuple):
    """One completion with the task that it answers."""

    completion: str
    answer: str
    prompt: str = ""
    metadata: Mapping[str, str] = {}
    tool_calls: int = 0
    """Calls that a tool has answered."""

    @classmethod
    def of(cls, sample: Sample, task: Task) -> Self:
        answered = sum(not turn.by_policy for turn in sample.turns)
        return cls(sample.text, task.answer, task.prompt, task.metadata, answered)


DRY_ITEM = RewardInput("<think>0 + 1 = 1</think><answer>1</answer>", "1", "0 + 1 = ?")
"""What every reward function of a user is tried on before anything starts."""


FailureKind = Literal[
    "timeout",
    "raised",
    "crashed",
    "memory",
    "output",
    "bad_value",
    "none",
    "import",
    "start",
    "http_timeout",
    "http_connection",
    "http_status",
    "http_bad_reply",
    "overlong",
    "extraction",
]
"""Why there is no score.

- `timeout`          the verifier took longer than `rewards.deadline_s` and was killed
- `raised`           it raised an exception
- `crashed`          its process ended: a signal, os._exit
- `memory`           it used more than `rewards.memory_bytes` and was killed, or raised MemoryError
- `output`           something wrote to the pool's private channel, or the answer was no answer
- `bad_value`        it returned something that is no finite number, or one that no loss survives
- `none`             it returned None: it says itself that it cannot judge
- `import`           it could not be imported in its process
- `start`            its process did not come up within `rewards.start_timeout_s`
- `http_timeout`     the judge did not answer in time, in any attempt
- `http_connection`  the judge could not be reached
- `http_status`      the judge answered with an error status
- `http_bad_reply`   the judge's reply is too large, no JSON, or has no number where it should
- `extraction`       not a failure of judging: looking for the answer in a completion, for maj@k, raised an exception or
                     gave no text (one that hangs or dies is a `timeout` or `crashed`, as in judging)
- `overlong`         not a failure of a verifier: the sample was cut, and `rewards.overlong` is `filter`
"""


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """Why one reward has no score; `reason` is for people, `kind` for counting."""

    kind: FailureKind
    reason: str


Outcome = float | RewardFailure


@dataclass(frozen=True, slots=True)
class RewardResult:
    """`reward` is the weighted sum of `scores`, or None: then the sample is masked, never scored 0.

    `failures` has every reward that failed, by name, also those that are not required;
    `failure` ("" if there is a reward) and `reason` are of the first one that made the sample unverifiable.
    """

    scores: dict[str, float] = field(default_factory=dict)
    reward: float | None = None
    failures: dict[str, RewardFailure] = field(default_factory=dict)
    failure: FailureKind | Literal[""] = ""
    reason: str = ""


def unverifiable(kind: FailureKind, reason: str, *, name: str = "reward") -> RewardResult:
    """No judgement, because of one failure."""
    return RewardResult(failures={name: RewardFailure(kind, reason)}, failure=kind, reason=reason)


def verdict_of(outcomes: Mapping[str, Outcome], functions: Sequence[RewardConfig]) -> RewardResult:
    """sum of weight * score over all rewards that have one, unless a required one has none."""
    scores = {name: outcome for name, outcome in outcomes.items() if not isinstance(outcome, RewardFailure)}
    failures = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, RewardFailure)}
    for function in functions:
        if function.required and function.name in failures:
            failure = failures[function.name]
            return RewardResult(scores, None, failures, failure.kind, f"{function.name}: {failure.reason}")
    reward = math.fsum(function.weight * scores[function.name] for function in functions if function.name in scores)
    if not math.isfinite(reward):
        total = RewardFailure("bad_value", f"the weighted sum of {scores} is {reward}. Lower the weights")
        return RewardResult(scores, None, {**failures, "sum": total}, total.kind, total.reason)
    return RewardResult(scores, reward, failures)


CUT = "length"
"""Finish reason of a completion that reached max_tokens."""


def with_length(
    verdict: RewardResult, rule: RewardsConfig, *, length: int, finish_reason: str, max_tokens: int
) -> RewardResult:
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


def _masked(verdict: RewardResult, max_tokens: int) -> RewardResult:
    cut = unverifiable(
        "overlong", f"the completion was cut at {max_tokens} tokens. Raise sampling.max_tokens", name=OVERLONG
    )
    return dataclasses.replace(cut, scores=verdict.scores, failures={**verdict.failures, **cut.failures})


MAX_SCORE = 1e6
"""Of the absolute value: beyond it, float32 losses lose everything else in the batch."""


def as_score(value: object) -> float:
    """A number, or what says that it is one (numpy and torch scalars). Raises ValueError for anything else.

    A text is none, even "1": a function that returns its answer instead of a score should be noticed.
    """
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__") or getattr(value, "ndim", 0) != 0:
        raise ValueError(f"{_shown(value)} is a {type(value).__name__}, not a number")
    try:
        score = float(value)
    except Exception as error:  # whatever the __float__ of a value of the user's may raise
        raise ValueError(f"a {type(value).__name__} is no score: {type(error).__name__}: {error}") from error
    if not abs(score) <= MAX_SCORE:
        raise ValueError(f"{score} is not a finite number within {MAX_SCORE:g}")
    return score


def _shown(value: object) -> str:
    """Bounded, also for values whose repr raises."""
    try:
        return repr(value)[:80]
    except Exception:  # or its __repr__
        return "the value"
