"""Two custom reward functions, tried on a few completions in the same processes as in a run.

    python -m examples.reward_functions

In a configuration:

    rewards:
      functions:
        - {name: "examples.reward_functions:right_answer"}
        - {name: "examples.reward_functions:Brevity", weight: 0.2, required: false}
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from async_grpo.config.rewards import RewardConfig, RewardsConfig
from async_grpo.rewards.base import RewardInput
from async_grpo.rewards.pool import RewardPool


def right_answer(completion: str, answer: str, *, metadata: Mapping[str, str]) -> float | None:
    """Return 1 if the last word is the answer. None means "cannot judge": the sample is masked, not scored 0."""
    if metadata.get("open_ended") == "yes":
        return None
    words = completion.split()
    return float(bool(words) and words[-1].strip(".") == answer)


class Brevity:
    """Subtract a hundredth per character. A class is constructed once per verifier process, without arguments."""

    async def __call__(self, completion: str, answer: str) -> float:
        return max(0.0, 1.0 - len(completion) / 100)


async def main() -> None:
    """Print the rewards of three items."""
    functions = [
        RewardConfig(name="examples.reward_functions:right_answer"),
        RewardConfig(name="examples.reward_functions:Brevity", weight=0.2, required=False),
    ]
    items = [
        RewardInput("It is 4.", "4", prompt="2 + 2 = ?"),
        RewardInput("It is 5.", "4", prompt="2 + 2 = ?"),
        RewardInput("Because it is there.", "", prompt="Why?", metadata={"open_ended": "yes"}),
    ]
    async with RewardPool(RewardsConfig(functions=functions, deadline_s=5.0)) as pool:
        for item, verdict in zip(items, await pool.judge(items), strict=True):
            outcome = f"masked, {verdict.reason}"
            if verdict.reward is not None:
                outcome = f"{verdict.reward:.3f}"
            print(f"{item.completion!r}: {outcome}")


if __name__ == "__main__":
    asyncio.run(main())
