"""Inputs and results of reward functions, and their combination into the reward that is trained on.

- RewardInput         one completion with its task
- RewardResult        scores by reward function, failures, and their weighted sum; made by `combine_outcomes`
- apply_overlong_rule the rule for overlong samples (DAPO, arXiv 2503.14476, section 3.4)
- parse_score         conversion of a verifier's result to a score

A completion that was cut at `max_tokens` may be wrong only because it ran out of tokens. `rewards.overlong: filter`
masks it. `soft` penalises length before that point: with L = soft_overlong_tokens,

    penalty(n) = 0                                            n <= max_tokens - L
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
"""Maximum absolute score. A larger one would make the other samples of the batch vanish in the rounding of float32."""


class RewardInput(NamedTuple):
    """Input of a reward function: one completion with its task."""

    completion: str
    answer: str
    prompt: str = ""
    metadata: Mapping[str, str] = {}
    tool_calls: int = 0
    """Number of answered tool calls."""

    @classmethod
    def from_sample(cls, sample: Sample, task: Task) -> Self:
        """Return the input for one sample of a task."""
        tool_calls = sum(not turn.by_policy for turn in sample.turns)
        return cls(sample.text, task.answer, task.prompt, task.metadata, tool_calls)


TRIAL_INPUT = RewardInput("<think>0 + 1 = 1</think><answer>1</answer>", "1", "0 + 1 = ?")
"""Input on which custom reward functions are tried before a run starts."""
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
"""Kind of failure that left a completion without a score.

- `timeout`          the verifier took longer than `rewards.deadline_s` and was killed
- `raised`           it raised an exception
- `crashed`          its process ended: a signal, os._exit
- `memory`           it used more than `rewards.memory_bytes` and was killed, or raised MemoryError
- `output`           other code wrote to the pool's private channel, or the reply was invalid
- `bad_value`        it returned something other than a finite number up to MAX_SCORE
- `none`             it returned None: it cannot judge this completion
- `import`           it could not be imported in its process
- `start`            its process was not ready within `rewards.start_timeout_s`
- `http_timeout`     the judge did not answer in time, in any attempt
- `http_connection`  the judge could not be reached
- `http_status`      the judge answered with an error status
- `http_bad_reply`   the judge's reply is too large, no JSON, or has no number where it should
- `extraction`       not a failure of judging: extracting the answer of a completion, for maj@k, raised an exception or
                     returned no text (a hang is a `timeout` and a dead process `crashed`, as in judging)
- `overlong`         not a failure of a verifier: the sample was cut, and `rewards.overlong` is `filter`
"""


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """Failure of one reward function. `reason` is for people, `kind` for counters."""

    kind: FailureKind
    reason: str


Outcome = float | RewardFailure
"""Result of one verifier for one completion."""
ExtractedAnswer = str | RewardFailure | None
"""Answer extracted from a completion; None if it has none."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """Combined result of all reward functions for one completion.

    `reward` is the weighted sum of `scores`, or None: then the sample is masked, never scored 0. `failures` contains
    every failed reward function by name, required or not. `failure` ("" if there is none) and `reason` describe the
    first failure that made the sample unverifiable.
    """

    scores: dict[str, float] = field(default_factory=dict)
    reward: float | None = None
    failures: dict[str, RewardFailure] = field(default_factory=dict)
    failure: FailureKind | Literal[""] = ""
    reason: str = ""


def combine_outcomes(outcomes: Mapping[str, Outcome], functions: Sequence[RewardConfig]) -> RewardResult:
    """Sum weight * score over the reward functions with a score. There is no reward if a required function failed."""
    scores: dict[str, float] = {}
    failures: dict[str, RewardFailure] = {}
    for name, outcome in outcomes.items():
        if isinstance(outcome, RewardFailure):
            failures[name] = outcome
        else:
            scores[name] = outcome

    for function in functions:
        if function.required and function.name in failures:
            failure = failures[function.name]
            return RewardResult(scores, None, failures, failure.kind, f"{function.name}: {failure.reason}")

    reward = math.fsum(function.weight * scores[function.name] for function in functions if function.name in scores)
    if not math.isfinite(reward):
        total = RewardFailure("bad_value", f"the weighted sum of {scores} is {reward}. Lower the weights")
        return RewardResult(scores, None, {**failures, "sum": total}, total.kind, total.reason)
    return RewardResult(scores, reward, failures)


def apply_overlong_rule(
    result: RewardResult, rule: RewardsConfig, *, length: int, finish_reason: str, max_tokens: int
) -> RewardResult:
    """Apply `rewards.overlong` to the result of a completion of `length` tokens.

    A sample that was already unverifiable keeps its own reason.
    """
    if result.reward is None or rule.overlong == "none":
        return result
    if rule.overlong == "filter":
        if finish_reason != CUT:
            return result
        cut = RewardFailure("overlong", f"the completion was cut at {max_tokens} tokens. Raise sampling.max_tokens")
        return RewardResult(result.scores, None, {**result.failures, OVERLONG: cut}, cut.kind, cut.reason)
    assert rule.soft_overlong_tokens is not None
    penalty = soft_length_penalty(
        length, max_tokens=max_tokens, last_tokens=rule.soft_overlong_tokens, factor=rule.soft_overlong_factor
    )
    scores = {**result.scores, OVERLONG: penalty}
    return dataclasses.replace(result, scores=scores, reward=result.reward + penalty)


def soft_length_penalty(length: int, *, max_tokens: int, last_tokens: int, factor: float) -> float:
    """Return 0 up to max_tokens - last_tokens, and then a penalty that falls linearly to -factor at max_tokens.

    >>> [soft_length_penalty(n, max_tokens=100, last_tokens=20, factor=1.0) for n in (80, 90, 100, 120)]
    [0.0, -0.5, -1.0, -1.0]
    """
    excess = min(max(0, length - (max_tokens - last_tokens)), last_tokens)
    return 0.0 if excess == 0 else -factor * excess / last_tokens


def parse_score(value: object) -> float:
    """Convert a number, or a scalar of numpy or torch, to a float. Raises ValueError for anything else.

    Strings are rejected, even "1", to detect functions that return an answer instead of a score.
    """
    is_text = isinstance(value, (str, bytes))
    if is_text or not hasattr(value, "__float__") or getattr(value, "ndim", 0) != 0:
        raise ValueError(f"{_short_repr(value)} is a {type(value).__name__}, not a number")
    try:
        score = float(value)
    except Exception as error:  # a user's __float__ may raise anything
        raise ValueError(f"a {type(value).__name__} is not a score: {type(error).__name__}: {error}") from error
    if not abs(score) <= MAX_SCORE:
        raise ValueError(f"{score} is not a finite number within {MAX_SCORE:g}")
    return score


def _short_repr(value: object) -> str:
    """The value's repr, cut at 80 characters; "the value" if its repr raises."""
    try:
        return repr(value)[:80]
    except Exception:  # a user's __repr__ may raise anything
        return "the value"
