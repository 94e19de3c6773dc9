"""What a reward sees and gives, and the one number that is trained on.

- RewardInput    one completion with its task
- RewardResult   scores by reward, failures, and their weighted sum; `combine` makes it
- with_length    the rule for overlong samples (DAPO, arXiv 2503.14476, section 3.4)
- as_score       which values count as a score

A completion that was cut at `max_tokens` is wrong for want of room, not of reasoning. `rewards.overlong: filter`
keeps it out of the loss. `soft` tells the policy before it gets there: with L = soft_overlong_tokens,

    punishment(n) = 0                                         n <= max_tokens - L
                  = factor * ((max_tokens - L) - n) / L       above, down to -factor at max_tokens
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

CUT = "length"
"""Finish reason of a completion that reached max_tokens."""
MAX_SCORE = 1e6
"""Largest absolute value of a score: beyond it, float32 losses lose everything else in the batch."""


class RewardInput(NamedTuple):
    """What a reward function may look at: one completion with the task that it answers."""

    completion: str
    answer: str
    prompt: str = ""
    metadata: Mapping[str, str] = {}
    tool_calls: int = 0
    """Number of tool calls that were answered."""

    @classmethod
    def of(cls, sample: Sample, task: Task) -> Self:
        """The input for one sample of a task."""
        answered = sum(not turn.by_policy for turn in sample.turns)
        return cls(sample.text, task.answer, task.prompt, task.metadata, answered)


DRY_ITEM = RewardInput("<think>0 + 1 = 1</think><answer>1</answer>", "1", "0 + 1 = ?")
"""The item that every reward function of a user is tried on before a run starts."""
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
- `output`           something wrote to the pool's private channel, or the reply was not valid
- `bad_value`        it returned no finite number, or one above MAX_SCORE
- `none`             it returned None, which says that it cannot judge
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
    """Why one reward has no score. `reason` is for people, `kind` for counting."""

    kind: FailureKind
    reason: str


Outcome = float | RewardFailure
"""What judging a completion by one verifier gives."""
Extracted = str | RewardFailure | None
"""What looking for the answer in a completion gives; None if it has no answer."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The judgement of one completion.

    `reward` is the weighted sum of `scores`, or None: then the sample is masked, never scored 0. `failures` has every
    reward that failed, by name, required or not. `failure` ("" if there is a reward) and `reason` describe the first
    one that made the sample unverifiable.
    """

    scores: dict[str, float] = field(default_factory=dict)
    reward: float | None = None
    failures: dict[str, RewardFailure] = field(default_factory=dict)
    failure: FailureKind | Literal[""] = ""
    reason: str = ""


def combine(outcomes: Mapping[str, Outcome], functions: Sequence[RewardConfig]) -> RewardResult:
    """The result of all rewards: the sum of weight * score over those with a score.

    There is no reward if a required one failed.
    """
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


def with_length(
    result: RewardResult, rule: RewardsConfig, *, length: int, finish_reason: str, max_tokens: int
) -> RewardResult:
    """The result of a completion of `length` tokens after the rule for overlong samples (`rewards.overlong`).

    A sample that was unverifiable before stays so, for its own reason.
    """
    if result.reward is None or rule.overlong == "none":
        return result
    if rule.overlong == "filter":
        if finish_reason != CUT:
            return result
        cut = RewardFailure("overlong", f"the completion was cut at {max_tokens} tokens. Raise sampling.max_tokens")
        return RewardResult(result.scores, None, {**result.failures, OVERLONG: cut}, cut.kind, cut.reason)
    assert rule.soft_overlong_tokens is not None
    punishment = soft_punishment(
        length, max_tokens=max_tokens, last=rule.soft_overlong_tokens, factor=rule.soft_overlong_factor
    )
    scores = {**result.scores, OVERLONG: punishment}
    return dataclasses.replace(result, scores=scores, reward=result.reward + punishment)


def soft_punishment(length: int, *, max_tokens: int, last: int, factor: float) -> float:
    """0 up to max_tokens - last, then linearly down to -factor at max_tokens (and no further).

    >>> [soft_punishment(n, max_tokens=100, last=20, factor=1.0) for n in (80, 90, 100, 120)]
    [0.0, -0.5, -1.0, -1.0]
    """
    exceed = min(max(0, length - (max_tokens - last)), last)
    return 0.0 if exceed == 0 else -factor * exceed / last


def as_score(value: object) -> float:
    """The value as a float: a number, or a scalar of numpy or torch. Raises ValueError for anything else.

    A text is not a score, not even "1", so that a function that returns its answer instead of a score is noticed.
    """
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__") or getattr(value, "ndim", 0) != 0:
        raise ValueError(f"{_shown(value)} is a {type(value).__name__}, not a number")
    try:
        score = float(value)
    except Exception as error:  # a user's __float__ may raise anything
        raise ValueError(f"a {type(value).__name__} is not a score: {type(error).__name__}: {error}") from error
    if not abs(score) <= MAX_SCORE:
        raise ValueError(f"{score} is not a finite number within {MAX_SCORE:g}")
    return score


def _shown(value: object) -> str:
    """The value's repr, bounded; "the value" if its repr raises."""
    try:
        return repr(value)[:80]
    except Exception:  # a user's __repr__ may raise anything
        return "the value"
