"""Scores stored samples again with another reward function: what would a corrected function have given?

The function runs in a verifier process with a deadline, as in a run, so one that hangs or crashes counts as a failure.
Samples are stored without the metadata of their task, so a function that needs it cannot judge them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from async_grpo.app.launch.checks.trials import check_rewards
from async_grpo.app.runs.samples import Group
from async_grpo.config.rewards import RewardConfig, RewardsConfig
from async_grpo.rewards.base import RewardInput
from async_grpo.rewards.pool import RewardPool

_SAME = 1e-9
"""Maximum difference of rewards that count as equal."""


@dataclass(frozen=True, slots=True)
class RescoreSummary:
    """Rewards before and after, over all completions of the rescored groups."""

    completions: int
    changed: int
    mean_before: float
    mean_after: float
    unverifiable: int
    first_reason: str
    """Why the first unverifiable completion could not be judged."""

    def __str__(self) -> str:
        line = (
            f"rescored {self.completions} completions: {self.changed} have another reward, "
            f"mean {self.mean_before:.3f} -> {self.mean_after:.3f}"
        )
        if self.unverifiable:
            line += f"; {self.unverifiable} could not be judged, the first because {self.first_reason}"
        return line


def rescore_groups(groups: Sequence[Group], function: str) -> RescoreSummary:
    """Add `new_reward` to every completion of `groups`: its reward by `function`, None if it cannot be judged.

    `function` is a built-in verifier or `module:attribute`. Raises ConfigError if it cannot be used.
    """
    rewards = RewardsConfig(functions=[RewardConfig(name=function)])
    check_rewards(rewards)
    completions = [completion for group in groups for completion in group["completions"]]
    items = [_input_of(group, completion) for group in groups for completion in group["completions"]]
    results = asyncio.run(_judge(rewards, items))

    reasons = []
    for completion, result in zip(completions, results, strict=True):
        completion["new_reward"] = result.reward
        if result.reward is None:
            reasons.append(result.reason)
    return RescoreSummary(
        completions=len(completions),
        changed=sum(_has_changed(completion) for completion in completions),
        mean_before=_mean([completion.get("reward") for completion in completions]),
        mean_after=_mean([completion["new_reward"] for completion in completions]),
        unverifiable=len(reasons),
        first_reason=reasons[0] if reasons else "",
    )


async def _judge(rewards: RewardsConfig, items: Sequence[RewardInput]) -> list[Any]:
    async with RewardPool(rewards) as pool:
        return list(await pool.judge(items))


def _input_of(group: Group, completion: dict[str, Any]) -> RewardInput:
    # A turn is [start, end, by_policy]; the others are observations, one per answered tool call.
    tool_calls = sum(not by_policy for _, _, by_policy in completion.get("turns", ()))
    return RewardInput(
        str(completion.get("text", "")),
        str(group.get("answer", "")),
        prompt=str(group.get("prompt", "")),
        tool_calls=tool_calls,
    )


def _has_changed(completion: dict[str, Any]) -> bool:
    before, after = completion.get("reward"), completion["new_reward"]
    if before is None or after is None:
        return before is not after
    return abs(before - after) > _SAME


def _mean(rewards: Sequence[float | None]) -> float:
    """Return the mean of the rewards that are not None; 0 without any."""
    judged = [reward for reward in rewards if reward is not None]
    return sum(judged) / max(1, len(judged))
