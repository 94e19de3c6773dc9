"""Where prompts come from: an endless, deterministic stream of tasks, and held-out tasks for evaluation.

- `TaskSource`        the contract
- `JsonlSource`       rows of a JSON-lines file (`jsonl`)
- `PreparedSource`    rows of a folder that `async-grpo prepare` has made (`prepared_source`)
- `ArithmeticSource`  generated problems (`arithmetic_source`)
- `make_source`       the one that a configuration asks for

The stream is a pure function of (configuration, index), so that every server of a run sees the
same tasks and a restarted one goes on where it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from async_grpo.config import RunConfig
from async_grpo.wire import Task, tokens_to_bytes


class RejectedRow(Exception):
    """A row that is not taken. `reason` is for counting, the text says what it was."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


class TaskSource(Protocol):
    """Guarantees: `task(i)` is deterministic and defined for every i >= 0; no held-out prompt is in it."""

    @property
    def dropped(self) -> Mapping[str, int]:
        """Rows that are not used, counted by reason; as text with the first of each."""
        ...

    def task(self, index: int) -> Task:
        """The task at this position of the stream."""
        ...

    def held_out(self) -> list[Task]:
        """The tasks for evaluation, always the same."""
        ...


def make_task(index: int, prompt: str, tokens: list[int], answer: str, metadata: dict[str, str] | None = None) -> Task:
    """A task record."""
    return Task(
        index=index,
        prompt=prompt,
        prompt_tokens=tokens_to_bytes(tokens),
        answer=answer,
        metadata=metadata or {},
    )


def prompt_limit(config: RunConfig) -> int:
    """The longest prompt that leaves room for a whole completion, in tokens."""
    room = config.rollout.vllm.max_model_len - config.sampling.max_tokens
    return min(config.data.max_prompt_tokens, room)
