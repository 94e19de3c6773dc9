"""Talking to a policy: a question goes in as in training, the reply comes out piece by piece.

    question --Wording--> prompt --Sampler.stream--> TextStream --> text, as it settles

It waits for the sampler's next piece. One question at a time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count

from async_grpo.config import RunConfig
from async_grpo.data.source import Tokenizer
from async_grpo.data.wording import Wording
from async_grpo.errors import DataError
from rollout_server.engines.protocol import GenerationRequest, Sampler
from rollout_server.http.text import TextStream


@dataclass
class Reply:
    """What came so far. `tokens_by_version`: policy version -> tokens."""

    question: str
    prompt: str
    text: str = ""
    tokens_by_version: dict[int, int] = field(default_factory=dict)
    finish_reason: str = ""

    @property
    def tokens(self) -> int:
        """Of the reply."""
        return sum(self.tokens_by_version.values())


class Conversation:
    """`async for text in talk.ask(question)`; then `talk.last` says what is to be said of the reply."""

    def __init__(self, config: RunConfig, sampler: Sampler, tokenizer: Tokenizer, wording: Wording) -> None:
        self._longest = config.rollout.vllm.max_model_len
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._wording = wording
        self._said: list[str] = []
        self._numbers = count(1)
        self.temperature = config.sampling.temperature
        self.max_tokens = config.sampling.max_tokens
        self.seed: int | None = None
        self.last: Reply | None = None

    async def ask(self, question: str) -> AsyncGenerator[str, None]:
        """The reply, as it comes. Raises DataError for what cannot be a prompt, EngineError, WaitTimeout."""
        prompt, tokens = self._prompt(question)
        reply = self.last = Reply(question, prompt)
        request = GenerationRequest(
            request_id=f"chat-{next(self._numbers)}",
            prompt=tokens,
            max_tokens=min(self.max_tokens, self._longest - len(tokens)),
            temperature=self.temperature,
            seed=self.seed,
            interruptible=False,
        )
        stream = TextStream(lambda ids: self._tokenizer.decode(ids, skip_special_tokens=True))
        async with aclosing(self._sampler.stream(request)) as pieces:
            async for piece in pieces:
                for span in piece.spans:
                    made = reply.tokens_by_version.get(span.version, 0)
                    reply.tokens_by_version[span.version] = made + span.end - span.start
                reply.finish_reason = piece.finish_reason
                text = stream.push(piece.tokens.tolist()) + (stream.finish() if piece.finish_reason else "")
                reply.text += text
                if text:
                    yield text
        if self._wording.remembers:
            self._said += [question, reply.text]

    def reset(self) -> None:
        """Forget what was said."""
        self._said.clear()
        self.last = None

    @property
    def remembers(self) -> bool:
        """Whether a question is read together with what was said before it."""
        return self._wording.remembers

    def _prompt(self, question: str) -> tuple[str, list[int]]:
        try:
            prompt, tokens = self._wording.prompt(self._said, question)
        except Exception as error:  # whatever a template or a tokenizer raises for a text that it does not know
            raise DataError(f"this cannot be a prompt of the policy: {type(error).__name__}: {error}") from error
        if not tokens or len(tokens) >= self._longest:
            raise DataError(
                f"the prompt has {len(tokens)} tokens: it must have some, and leave room for a reply within "
                f"rollout.vllm.max_model_len ({self._longest}). Say less, or forget what was said (/reset)"
            )
        return prompt, tokens
