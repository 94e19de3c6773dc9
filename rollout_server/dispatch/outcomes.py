"""Pure decisions on a group whose samples are complete, and counters of the groups' outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from async_grpo.config import RunConfig
from async_grpo.rewards.base import RewardResult, apply_overlong_rule
from async_grpo.wire import ReleaseReason, Sample

MIN_REWARDS = 2
"""Minimum rewards per group, because an advantage compares the samples of a group."""


def describe_invalid_sample(samples: Sequence[Sample]) -> str | None:
    """Return index and reason of the first sample that `Sample.validate` rejects; None if all are valid."""
    for index, sample in enumerate(samples):
        try:
            sample.validate()
        except ValueError as error:
            return f"sample {index}: {error}"
    return None


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
    """Return the sample with its rewards, or with the kind of failure and its reason."""
    unverifiable = f"{result.failure}: {result.reason}" if result.failure else ""
    return msgspec.structs.replace(sample, rewards=result.scores, reward=result.reward, unverifiable=unverifiable)


def discard_reason(samples: Sequence[Sample], *, dynamic_sampling: bool) -> ReleaseReason | None:
    """Reason why the group cannot be trained, or None if it can.

    `unverifiable`: fewer than MIN_REWARDS samples were judged. `filtered`: with dynamic sampling, all rewards are
    equal, so every advantage would be 0.
    """
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if len(rewards) < MIN_REWARDS:
        return ReleaseReason.UNVERIFIABLE
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
