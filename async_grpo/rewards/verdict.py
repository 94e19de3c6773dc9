"""The judgement of one completion: scores by reward, what failed, and the one number that is trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from async_grpo.config.rewards import RewardConfig

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
class Failure:
    """Why one reward has no score; `reason` is for people, `kind` for counting."""

    kind: FailureKind
    reason: str


Outcome = float | Failure


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reward` is the weighted sum of `scores`, or None: then the sample is masked, never scored 0.

    `failures` has every reward that failed, by name, also those that are not required;
    `failure` ("" if there is a reward) and `reason` are of the first one that made the sample unverifiable.
    """

    scores: dict[str, float] = field(default_factory=dict)
    reward: float | None = None
    failures: dict[str, Failure] = field(default_factory=dict)
    failure: FailureKind | Literal[""] = ""
    reason: str = ""


def unverifiable(kind: FailureKind, reason: str, *, name: str = "reward") -> Verdict:
    """No judgement, because of one failure."""
    return Verdict(failures={name: Failure(kind, reason)}, failure=kind, reason=reason)


def verdict_of(outcomes: Mapping[str, Outcome], functions: Sequence[RewardConfig]) -> Verdict:
    """sum of weight * score over all rewards that have one, unless a required one has none."""
    scores = {name: outcome for name, outcome in outcomes.items() if not isinstance(outcome, Failure)}
    failures = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Failure)}
    for function in functions:
        if function.required and function.name in failures:
            failure = failures[function.name]
            return Verdict(scores, None, failures, failure.kind, f"{function.name}: {failure.reason}")
    reward = math.fsum(function.weight * scores[function.name] for function in functions if function.name in scores)
    if not math.isfinite(reward):
        total = Failure("bad_value", f"the weighted sum of {scores} is {reward}. Lower the weights")
        return Verdict(scores, None, {**failures, "sum": total}, total.kind, total.reason)
    return Verdict(scores, reward, failures)
