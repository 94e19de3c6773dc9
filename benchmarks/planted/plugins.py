"""Plug-ins of the planted runs: a slow reward function and a slow data source.

Verifier processes import this module too, so it imports little.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from async_grpo.lab.bench.pipeline.fixed_lengths import PrescribedLengths, reward

if TYPE_CHECKING:
    from async_grpo.data.tokenizer import Tokenizer
    from async_grpo.wire import Task

REWARD_S = 0.15
ROW_S = 0.5


def slow_reward(completion: str, answer: str) -> float:
    """Return the bench's reward after sleeping, as if a remote reward model had been asked."""
    time.sleep(REWARD_S)
    return reward(completion, answer)


class SlowRows(PrescribedLengths):
    """The bench's workflow. After its constructor, every row of a JSON-lines file takes ROW_S longer to read."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        from async_grpo.data.jsonl import JsonlSource

        read_task = JsonlSource.task

        def read_slowly(source: JsonlSource, index: int) -> Task:
            time.sleep(ROW_S)
            return read_task(source, index)

        setattr(JsonlSource, "task", read_slowly)  # noqa: B010
