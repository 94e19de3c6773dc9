"""Custom workflow: the policy answers, is asked if it is sure, and answers again.

async-grpo run configs/quickstart.yaml -o rollout.workflow=examples.ask_twice:AskTwice
"""

from __future__ import annotations

from async_grpo.data.tokenizer import Tokenizer, encode_one
from async_grpo.wire import Sample, Task
from rollout_server.workflows.session import SampleSession

QUESTION = "\nAre you sure? "


class AskTwice:
    """Constructed once with the run's tokenizer; `run` is called for every sample, concurrently."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def run(self, task: Task, session: SampleSession) -> Sample:
        """Return two turns with our question between them, which gets no gradient. The second answer is judged."""
        first = await session.turn()
        if first.finish_reason != "stop":  # interrupted by new weights, or the completion is full
            return session.sample(self._decode(first.tokens.tolist()))
        await session.observe(self._encode_question)
        answer = first
        if session.tokens_left:
            answer = await session.turn()
        return session.sample(self._decode(answer.tokens.tolist()))

    async def _encode_question(self) -> list[int]:
        # Without the tokens that start a prompt: we are in the middle of a conversation.
        return encode_one(self._tokenizer, QUESTION, special_tokens=False)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)
