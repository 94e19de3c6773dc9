"""One prompt, one completion.

How one sample comes about.
"""

from __future__ import annotations

from typing import Protocol

from async_grpo.data.tokenizer import Tokenizer
from async_grpo.wire import Sample, Task
from rollout_server.workflows.session import SampleSession


class Workflow(Protocol):
    """Turns a task into a sample with the help of the engine. Runs many times concurrently."""

    async def run(self, task: Task, session: SampleSession) -> Sample:
        """One sample without rewards. Raises EngineError if the engine died; any other exception
        makes the group `failed`."""
        ...


class SingleTurn:
    """Completes the prompt once; the text is decoded without special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def run(self, task: Task, session: SampleSession) -> Sample:
        """The completion of the task's prompt."""
        generation = await session.turn()
        return session.sample(self._tokenizer.decode(generation.tokens.tolist(), skip_special_tokens=True))
