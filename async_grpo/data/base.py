"""The interface of prompt sources: an endless, deterministic stream of tasks, and held-out tasks for evaluation.

The stream is a pure function of (configuration, index). So all servers of a run get the same tasks, and a restarted
server continues where it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from async_grpo.config import RunConfig
from async_grpo.wire import Task, tokens_to_bytes


class RejectedRow(Exception):
    """A row cannot be used. `reason` is a category for counting, the message describes this row's problem."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


class TaskSource(Protocol):
    """A source of tasks. `task(i)` is deterministic, defined for every i >= 0, and never a held-out prompt."""

    @property
    def dropped(self) -> Mapping[str, int]:
        """Number of unused rows by reason. `str()` of it also names the first row of each reason."""
        ...

    def task(self, index: int) -> Task:
        """Return the task at position `index` of the stream."""
        ...

    def held_out(self) -> list[Task]:
        """Return the tasks for evaluation, the same on every call."""
        ...


def make_task(index: int, prompt: str, tokens: list[int], answer: str, metadata: dict[str, str] | None = None) -> Task:
    """Create the task at position `index` of the stream. `tokens`: token ids of `prompt`."""
    return Task(
        index=index,
        prompt=prompt,
        prompt_tokens=tokens_to_bytes(tokens),
        answer=answer,
        metadata=metadata or {},
    )


def prompt_limit(config: RunConfig) -> int:
    """Maximum tokens of a prompt, such that a completion of maximum length still fits."""
    room_for_prompt = config.rollout.limits.max_length - config.sampling.max_tokens
    return min(config.data.max_prompt_tokens, room_for_prompt)


def prompt_limit_reason(config: RunConfig) -> str:
    """Description of the keys behind `prompt_limit`, for errors."""
    limits = config.rollout.limits
    return (
        f"data.max_prompt_tokens is {config.data.max_prompt_tokens}, and a prompt must also fit into "
        f"{limits.length_key} ({limits.max_length}) minus sampling.max_tokens ({config.sampling.max_tokens})"
    )
