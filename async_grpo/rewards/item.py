"""What a reward may look at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:  # a verifier process has no use for them, nor for numpy
    from async_grpo.wire import Sample, Task


class Item(NamedTuple):
    """One completion with the task that it answers."""

    completion: str
    answer: str
    prompt: str = ""
    metadata: Mapping[str, str] = {}
    tool_calls: int = 0
    """Calls that a tool has answered."""

    @classmethod
    def of(cls, sample: Sample, task: Task) -> Self:
        answered = sum(not turn.by_policy for turn in sample.turns)
        return cls(sample.text, task.answer, task.prompt, task.metadata, answered)


DRY_ITEM = Item("<think>0 + 1 = 1</think><answer>1</answer>", "1", "0 + 1 = ?")
"""What every reward function of a user is tried on before anything starts."""
