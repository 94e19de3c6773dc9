"""The contract of a source of prompts: an endless, deterministic stream of tasks, and held-out tasks for evaluation.

The stream is a pure function of (configuration, index). So every server of a run sees the same tasks, and a restarted
server continues where it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from async_grpo.config import RunConfig
from async_grpo.wire import Task, tokens_to_bytes


class RejectedRow(Exception):
    """Raised for a row that cannot be used. `reason` is for counting, the text says what is wrong with it."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


class TaskSource(Protocol):
    """A source of tasks. `task(i)` is deterministic and defined for every i >= 0, and is never a held-out prompt."""

    @property
    def dropped(self) -> Mapping[str, int]:
        """Number of rows that are not used, by reason. Its text also names the first row of each reason."""
        ...

    def task(self, index: int) -> Task:
        """The task at this position of the stream."""
        ...

    def held_out(self) -> list[Task]:
        """The tasks for evaluation, always the same."""
        ...


def make_task(index: int, prompt: str, tokens: list[int], answer: str, metadata: dict[str, str] | None = None) -> Task:
    """The task at position `index` of the stream, with its prompt as text and as token ids."""
    return Task(
        index=index,
        prompt=prompt,
        prompt_tokens=tokens_to_bytes(tokens),
        answer=answer,
        metadata=metadata or {},
    )


def prompt_limit(config: RunConfig) -> int:
    """The most tokens of a prompt that leaves room for a whole completion."""
    room = config.rollout.limits.max_length - config.sampling.max_tokens
    return min(config.data.max_prompt_tokens, room)


def prompt_limit_reason(config: RunConfig) -> str:
    """The keys that make `prompt_limit`, for error texts."""
    limits = config.rollout.limits
    return (
        f"data.max_prompt_tokens is {config.data.max_prompt_tokens}, and {limits.length_key} ({limits.max_length}) "
        f"less sampling.max_tokens ({config.sampling.max_tokens}) must hold it"
    )
