"""Interface of workflows, and the simplest one: one completion per prompt."""

from __future__ import annotations

from typing import Protocol

from async_grpo.data.tokenizer import Tokenizer
from async_grpo.wire import Sample, Task
from rollout_server.workflows.session import SampleSession


class Workflow(Protocol):
    """Turns a task into a sample. One object serves all samples: `run` is called many times concurrently."""

    async def run(self, task: Task, session: SampleSession) -> Sample:
        """Return one sample without rewards.

        Raises EngineError if the engine died; any other exception makes the group `failed`.
        """
        ...


class SingleTurn:
    """The `single_turn` workflow: completes the prompt once and decodes the text without special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def run(self, task: Task, session: SampleSession) -> Sample:
        """Return a sample with one completion of the task's prompt. Raises EngineError."""
        generation = await session.turn()
        return session.sample(self._tokenizer.decode(generation.tokens.tolist(), skip_special_tokens=True))
