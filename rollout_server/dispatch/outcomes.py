"""Pure decisions on samples that have ended and on complete groups, and counters of the groups' outcomes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import msgspec

from async_grpo.config import RunConfig
from async_grpo.config.rollout import EndsConfig
from async_grpo.errors import RequestRefused, SampleOverdue
from async_grpo.rewards.base import RewardResult, apply_overlong_rule
from async_grpo.wire import ReleaseReason, Sample

MIN_REWARDS = 2
"""Minimum rewards per group, because an advantage compares the samples of a group."""

SampleFailureKind = Literal["workflow_error", "deadline", "refused"]
"""Ways in which a workflow fails. Each is a key of `rollout.ends`, and the finish reason of the failed sample."""


def failure_kind(error: BaseException) -> SampleFailureKind:
    """Return the way in which a workflow failed, from its error."""
    if isinstance(error, SampleOverdue):
        return "deadline"
    if isinstance(error, RequestRefused):
        return "refused"
    return "workflow_error"


def describe_problem(sample: Sample) -> str | None:
    """Return why `Sample.validate` rejects the sample; None if it is valid."""
    try:
        sample.validate()
    except ValueError as error:
        return str(error)
    return None


def replace_failed_sample(sample: Sample, kind: SampleFailureKind, reason: str) -> Sample:
    """Return a failed sample without tokens, to replace one that cannot be trained."""
    return Sample(
        tokens=b"",
        logprobs=b"",
        spans=[],
        text=sample.text,
        finish_reason=kind,
        unverifiable=f"{kind}: {reason}",
        started_s=sample.started_s,
        finished_s=sample.finished_s,
    )


def score_failed_sample(sample: Sample, ends: EndsConfig, reward_names: Sequence[str]) -> Sample:
    """Return a sample whose workflow failed, with reward 0 if `rollout.ends` has `zero` for its kind of failure.

    `reward_names`: the reward functions, each of which then has score 0.
    """
    if getattr(ends, sample.finish_reason) == "mask":
        return sample
    return msgspec.structs.replace(sample, reward=0.0, rewards=dict.fromkeys(reward_names, 0.0))


def score_unverifiable(result: RewardResult, ends: EndsConfig, reward_names: Sequence[str]) -> RewardResult:
    """Return the result with reward 0 if there is none and `rollout.ends.unverifiable` is `zero`.

    It keeps the failure, so that the sample still counts as one that could not be judged.
    """
    if result.reward is not None or ends.unverifiable == "mask":
        return result
    return dataclasses.replace(result, scores=dict.fromkeys(reward_names, 0.0), reward=0.0)


def apply_length_rule(sample: Sample, result: RewardResult, config: RunConfig) -> RewardResult:
    """Apply the configuration's rule for overlong samples to the reward."""
    return apply_overlong_rule(
        result,
        config.rewards,
        length=sample.length,
        finish_reason=sample.finish_reason,
        max_tokens=config.sampling.max_tokens,
    )


def attach_rewards(sample: Sample, result: RewardResult) -> Sample:
    """Return the sample with its rewards, and with the failure of a required reward function if there is one."""
    unverifiable = f"{result.failure}: {result.reason}" if result.failure else ""
    return msgspec.structs.replace(sample, rewards=result.scores, reward=result.reward, unverifiable=unverifiable)


def find_first_failure(samples: Sequence[Sample]) -> str:
    """Return why the first of the samples without a judgement failed; "" if all were judged."""
    return next((sample.unverifiable for sample in samples if sample.unverifiable), "")


def discard_reason(samples: Sequence[Sample], *, dynamic_sampling: bool) -> ReleaseReason | None:
    """Reason why the group cannot be trained, or None if it can.

    `failed`: there is no token at all, or there are fewer than MIN_REWARDS rewards because a workflow failed.
    `unverifiable`: there are fewer for another reason. `filtered`: with dynamic sampling, all rewards are equal, so
    every advantage would be 0.
    """
    if not any(sample.length for sample in samples):
        return ReleaseReason.FAILED
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if len(rewards) < MIN_REWARDS:
        has_failed = any(sample.finish_reason in get_args(SampleFailureKind) for sample in samples)
        return ReleaseReason.FAILED if has_failed else ReleaseReason.UNVERIFIABLE
    if dynamic_sampling and len(set(rewards)) == 1:
        return ReleaseReason.FILTERED
    return None


@dataclass(frozen=True, slots=True)
class GroupCounters:
    """Outcomes of this server's groups since its engine started.

    `groups`: by outcome (inserted, interrupted, and the release reasons of discarded ones). `samples`: samples of
    inserted groups, by finish reason. `reward_failures`: completions that were not judged, by kind.
    """

    groups: Counter[str] = field(default_factory=Counter)
    samples: Counter[str] = field(default_factory=Counter)
    reward_failures: Counter[str] = field(default_factory=Counter)

    def count_inserted(self, samples: Iterable[Sample]) -> None:
        """Count a group that was inserted into the buffer, and its samples."""
        self.groups["inserted"] += 1
        self.samples.update(sample.finish_reason for sample in samples)
