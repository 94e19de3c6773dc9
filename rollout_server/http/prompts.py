"""Encodes the prompts of requests and checks that the engine can process them."""

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
    """Encodes and checks prompts: not empty, not too long, and only tokens of the model's vocabulary.

    An unknown token could crash the engine, and with it the training.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocabulary: int, limits: EngineLimits) -> None:
        """`vocabulary`: size of the vocabulary, which bounds token ids.

        `limits`: limits of the engine, which bound prompt and completion together.
        """
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._limits = limits

    async def encode_text(self, prompt: str | list[int]) -> list[int]:
        """Return the token ids of a prompt without a chat template. Raises HttpError 400."""
        if isinstance(prompt, str):
            prompt = await _encode_in_thread(self._tokenizer.encode, prompt)
        return self._check_prompt(prompt)

    async def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation in the model's chat template. Raises HttpError 400."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise HttpError(
                400,
                "this model's tokenizer has no chat template, so messages cannot be formatted for the model. "
                "Use /v1/completions with a prompt, or add chat_template to the checkpoint's tokenizer_config.json",
                code="no_chat_template",
            )
        plain_messages = [message.to_template_input() for message in messages]
        return self._check_prompt(await _encode_in_thread(self._apply_chat_template, plain_messages))

    def max_completion_tokens(self, prompt: Sequence[int]) -> int:
        """Maximum tokens of a completion after this prompt."""
        return self._limits.max_length - len(prompt)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def decode_token(self, token: int) -> str:
        """Return the text of one token, special or not."""
        return self._tokenizer.decode([token])

    def _apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        tokenizer = cast(Any, self._tokenizer)
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # The template has written the special tokens already.
        return list(tokenizer.encode(text, add_special_tokens=False))

    def _check_prompt(self, prompt: list[int]) -> list[int]:
        if not prompt:
            raise HttpError(400, "prompt: it has no tokens. Send at least one", code="empty_prompt")
        largest = max(prompt)
        if largest >= self._vocabulary:
            raise HttpError(
                400,
                f"prompt: token {largest} is not in the model's vocabulary of {self._vocabulary}. "
                "Use the tokenizer of this model",
                code="unknown_token",
            )
        if self.max_completion_tokens(prompt) < 1:
            raise HttpError(
                400,
                f"prompt: {len(prompt)} tokens leave no room for a completion within {self._limits.length_key} "
                f"({self._limits.max_length}). Send a shorter prompt",
                code="context_length_exceeded",
            )
        return prompt


async def _encode_in_thread(encode: Callable[[Any], list[int]], prompt: Any) -> list[int]:
    """Encode in a thread, because a long text takes a while. Raises HttpError 400 if the tokenizer fails."""
    try:
        return await asyncio.to_thread(encode, prompt)
    except Exception as error:  # chat templates raise many kinds of errors for messages that they do not support
        raise HttpError(
            400,
            f"the tokenizer of this model rejects the prompt: {type(error).__name__}: {str(error)[:MAX_REASON_CHARS]}",
            code="bad_prompt",
        ) from error
