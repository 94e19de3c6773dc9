"""Selection among the groups of samples that a run has written (`Run.samples`)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Group = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """Conditions on a group, which must meet all of them; None is no condition."""

    seq: int | None = None
    pattern: re.Pattern[str] | None = None
    """Pattern that must match in the prompt or in a completion."""
    reward_min: float | None = None
    reward_max: float | None = None
    """At least one judged completion must have a reward within both limits."""

    def select(self, groups: Iterable[Group]) -> list[Group]:
        """Return the groups that meet the conditions, in the same order."""
        return [group for group in groups if self._accepts(group)]

    def _accepts(self, group: Group) -> bool:
        if self.seq is not None and group.get("seq") != self.seq:
            return False
        if self.pattern is not None and not any(map(self.pattern.search, _texts(group))):
            return False
        if self.reward_min is None and self.reward_max is None:
            return True
        low = -float("inf") if self.reward_min is None else self.reward_min
        high = float("inf") if self.reward_max is None else self.reward_max
        rewards = [sample["reward"] for sample in group["completions"] if sample.get("reward") is not None]
        return any(low <= reward <= high for reward in rewards)


def mean_reward(group: Group) -> float:
    """Return the mean reward of the completions. Completions that could not be judged count as 0."""
    rewards = [float(sample.get("reward") or 0.0) for sample in group["completions"]]
    return sum(rewards) / max(1, len(rewards))


def written_s(group: Group) -> float:
    """Return the time at which the group was written, in seconds since the epoch; 0 if unknown."""
    return float(group.get("time_s") or 0.0)


def _texts(group: Group) -> list[str]:
    return [str(group.get("prompt", "")), *(str(sample.get("text", "")) for sample in group["completions"])]
