"""Turns the prompts of requests into token ids that the engine can take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

from async_grpo.config.rollout import EngineLimits
from async_grpo.data.tokenizer import Tokenizer
from rollout_server.http.requests import Message
from rollout_server.http.streaming import HttpError

MAX_REASON_CHARS = 500


class PromptEncoder:
    """Encodes and checks prompts: never empty, never too long, and only tokens that the model has. An unknown token
    could crash the engine, and with it the training."""

    def __init__(self, tokenizer: Tokenizer, *, vocabulary: int, limits: EngineLimits) -> None:
        """`vocabulary`: token ids are below it. `limits`: of the engine; they bound prompt and completion together."""
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._limits = limits

    async def encode_text(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a prompt without a chat template. Raises HttpError 400."""
        return self._checked(await _tried(self._tokenizer.encode, prompt) if isinstance(prompt, str) else prompt)

    async def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation in the model's own chat template. Raises HttpError 400."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise HttpError(
                400,
                "this model's tokenizer has no chat template, so messages cannot be written as the model knows them. "
                "Use /v1/completions with a prompt, or add chat_template to the checkpoint's tokenizer_config.json",
                code="no_chat_template",
            )
        return self._checked(await _tried(self._encode_chat, [message.plain() for message in messages]))

    def room(self, prompt: Sequence[int]) -> int:
        """Most tokens that a completion of this prompt may have."""
        return self._limits.max_length - len(prompt)

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, without special tokens."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def name(self, token: int) -> str:
        """The text of one token, special or not."""
        return self._tokenizer.decode([token])

    def _encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The template writes the special tokens itself."""
        tokenizer = cast(Any, self._tokenizer)
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False))

    def _checked(self, prompt: list[int]) -> list[int]:
        if not prompt:
            raise HttpError(400, "prompt: it has no token. Send at least one", code="empty_prompt")
        if (largest := max(prompt)) >= self._vocabulary:
            raise HttpError(
                400,
                f"prompt: token {largest} is not in the model's vocabulary of {self._vocabulary}. "
                "Use the tokenizer of this model",
                code="unknown_token",
            )
        if self.room(prompt) < 1:
            raise HttpError(
                400,
                f"prompt: {len(prompt)} tokens leave no room for a completion within {self._limits.length_key} "
                f"({self._limits.max_length}). Send a shorter one",
                code="context_length_exceeded",
            )
        return prompt


async def _tried(encode: Callable[[Any], list[int]], given: Any) -> list[int]:
    """Encode in a thread, because a long text takes a while. Raises HttpError 400 for what the tokenizer refuses."""
    try:
        return await asyncio.to_thread(encode, given)
    except Exception as error:
        raise HttpError(
            400,
            f"the tokenizer of this model refuses the prompt: {type(error).__name__}: {str(error)[:MAX_REASON_CHARS]}",
            code="bad_prompt",
        ) from error
