"""What becomes of a group whose samples are complete: pure decisions, and counters of what became of each group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from async_grpo.config import RunConfig
from async_grpo.rewards.base import RewardResult, apply_overlong_rule
from async_grpo.wire import ReleaseReason, Sample

MIN_JUDGED = 2
"""Rewards that a group needs at least, because an advantage compares the samples of a group."""


def find_invalid_sample(samples: Sequence[Sample]) -> str:
    """The index of the first sample that `Sample.validate` refuses, with the reason; "" if it accepts all."""
    for index, sample in enumerate(samples):
        try:
            sample.validate()
        except ValueError as error:
            return f"sample {index}: {error}"
    return ""


def apply_length_rule(sample: Sample, result: RewardResult, config: RunConfig) -> RewardResult:
    """The reward after the rule of the configuration for overlong samples."""
    return apply_overlong_rule(
        result,
        config.rewards,
        length=sample.length,
        finish_reason=sample.finish_reason,
        max_tokens=config.sampling.max_tokens,
    )


def with_rewards(sample: Sample, result: RewardResult) -> Sample:
    """The sample with its rewards, or with the kind of failure and the reason why it has none."""
    why = f"{result.failure}: {result.reason}" if result.failure else ""
    return msgspec.structs.replace(sample, rewards=result.scores, reward=result.reward, unverifiable=why)


def reason_to_discard(samples: Sequence[Sample], *, dynamic_sampling: bool) -> ReleaseReason | None:
    """Why the group cannot be trained, or None if it can.

    `unverifiable`: fewer than 2 samples were judged. `filtered`: with dynamic sampling, all rewards
    are equal, so every advantage would be 0.
    """
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if len(rewards) < MIN_JUDGED:
        return ReleaseReason.UNVERIFIABLE
    if dynamic_sampling and len(set(rewards)) == 1:
        return ReleaseReason.FILTERED
    return None


@dataclass(frozen=True, slots=True)
class GroupCounters:
    """What became of the groups of this server since its engine started.

    `groups`: by outcome (inserted, interrupted, and the release reasons of discarded ones). `samples`: those of
    inserted groups, by finish reason. `reward_failures`: completions that were not judged, by kind.
    """

    groups: Counter[str] = field(default_factory=Counter)
    samples: Counter[str] = field(default_factory=Counter)
    reward_failures: Counter[str] = field(default_factory=Counter)

    def inserted(self, samples: Iterable[Sample]) -> None:
        """Count a group that was inserted into the buffer, and its samples."""
        self.groups["inserted"] += 1
        self.samples.update(sample.finish_reason for sample in samples)
