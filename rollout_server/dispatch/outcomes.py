"""What becomes of a group whose samples are there: pure decisions.

What became of the groups of this server, counted since its engine was started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from async_grpo.config import RunConfig
from async_grpo.rewards.base import RewardResult, with_length
from async_grpo.wire import ReleaseReason, Sample

MIN_JUDGED = 2
"""A group needs that many rewards: an advantage is a comparison."""


def what_is_broken(samples: Sequence[Sample]) -> str:
    """Why a sample of the group is none that can be trained (`Sample.validate`), or ""."""
    for index, sample in enumerate(samples):
        try:
            sample.validate()
        except ValueError as error:
            return f"sample {index}: {error}"
    return ""


def at_its_length(sample: Sample, verdict: RewardResult, config: RunConfig) -> RewardResult:
    """The verdict once the rule for overlong samples is applied."""
    return with_length(
        verdict,
        config.rewards,
        length=sample.length,
        finish_reason=sample.finish_reason,
        max_tokens=config.sampling.max_tokens,
    )


def with_verdict(sample: Sample, verdict: RewardResult) -> Sample:
    """The sample with its rewards, or with the kind of failure and the reason why there are none."""
    why = f"{verdict.failure}: {verdict.reason}" if verdict.failure else ""
    return msgspec.structs.replace(sample, rewards=verdict.scores, reward=verdict.reward, unverifiable=why)


def reason_to_discard(samples: Sequence[Sample], *, dynamic_sampling: bool) -> ReleaseReason | None:
    """Why the group cannot be trained, or None.

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
    """`groups` by outcome (inserted, interrupted, and the release reasons of discarded ones), `samples` of inserted
    groups by finish reason, `reward_failures` by kind."""

    groups: Counter[str] = field(default_factory=Counter)
    samples: Counter[str] = field(default_factory=Counter)
    reward_failures: Counter[str] = field(default_factory=Counter)

    def inserted(self, samples: Iterable[Sample]) -> None:
        """A group is in the buffer."""
        self.groups["inserted"] += 1
        self.samples.update(sample.finish_reason for sample in samples)
