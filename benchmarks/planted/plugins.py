"""Plug-ins of the planted runs: a reward function that takes its time, and a data source that does.

Imports are few, because verifier processes import this too.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from async_grpo.lab.bench.pipeline.fixed_lengths import PrescribedLengths, reward

if TYPE_CHECKING:
    from async_grpo.data.tokenizer import Tokenizer
    from async_grpo.wire import Task

REWARD_S, ROW_S = 0.15, 0.5


def slow_reward(completion: str, answer: str) -> float:
    """The bench's reward, after a while in which nothing is computed, as a reward model elsewhere would answer."""
    time.sleep(REWARD_S)
    return reward(completion, answer)


class SlowRows(PrescribedLengths):
    """The bench's workflow. Where it is made, every row of a JSON-lines file takes ROW_S to read from then on."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        from async_grpo.data.jsonl import JsonlSource

        read = JsonlSource.task

        def slow(source: JsonlSource, index: int) -> Task:
            time.sleep(ROW_S)
            return read(source, index)

        setattr(JsonlSource, "task", slow)  # noqa: B010
