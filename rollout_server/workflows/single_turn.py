"""One prompt, one completion."""

from __future__ import annotations

from async_grpo.data.source import Tokenizer
from async_grpo.wire import Sample, Task
from rollout_server.session import Session


class SingleTurn:
    """Completes the prompt once; the text is decoded without special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def run(self, task: Task, session: Session) -> Sample:
        """The completion of the task's prompt."""
        generation = await session.turn()
        return session.sample(self._tokenizer.decode(generation.tokens.tolist(), skip_special_tokens=True))
