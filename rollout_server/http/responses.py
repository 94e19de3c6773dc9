"""Answers in the shapes of OpenAI's API: pure functions of the completions.

Beyond that API, every choice, and every chunk of a stream, lists in `policy_versions` which policy version wrote its
tokens: [version, start, end), counted in the tokens of that choice or chunk.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from rollout_server.http.jobs import CompletionChunk

LOWEST_LOGPROB = -9999.0
"""Written in place of lower values, because JSON has no infinity."""


class ResponseFormat:
    """Formats the answers to one request, as /v1/completions or (`chat`) /v1/chat/completions writes them."""

    def __init__(
        self, model: str, name: Callable[[int], str], *, chat: bool, logprobs: bool = False, token_ids: bool = False
    ) -> None:
        """`model`: its name in the answer. `name`: one token as text. `logprobs`, `token_ids`: what the answer says of
        tokens beside their text."""
        self._chat = chat
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._name = name
        self._with_logprobs = logprobs
        self._with_token_ids = token_ids

    def whole(self, choices: Sequence[CompletionChunk], prompt_tokens: int, fingerprint: str) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        return {
            **self._head,
            "system_fingerprint": fingerprint,
            "choices": [self._choice(choice, self._message(choice.text)) for choice in choices],
            "usage": usage_of(prompt_tokens, sum(len(choice.tokens) for choice in choices)),
        }

    def chunk(self, chunk: CompletionChunk, fingerprint: str) -> dict[str, Any]:
        """One event of a stream."""
        text = {"delta": {"role": "assistant", "content": chunk.text}} if self._chat else {"text": chunk.text}
        return self._event([self._choice(chunk, text)], fingerprint)

    def usage(self, prompt_tokens: int, completion_tokens: int, fingerprint: str) -> dict[str, Any]:
        """The last event of a stream whose request asked for usage."""
        return {**self._event([], fingerprint), "usage": usage_of(prompt_tokens, completion_tokens)}

    def _event(self, choices: list[dict[str, Any]], fingerprint: str) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "system_fingerprint": fingerprint, "choices": choices}

    def _message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}} if self._chat else {"text": text}

    def _choice(self, made: CompletionChunk, text: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": made.index,
            **text,
            "logprobs": self._logprobs(made) if self._with_logprobs else None,
            "finish_reason": made.finish_reason or None,
            "policy_versions": [[span.version, span.start, span.end] for span in made.spans],
            **({"token_ids": made.tokens} if self._with_token_ids else {}),
        }

    def _logprobs(self, made: CompletionChunk) -> dict[str, Any]:
        names = [self._name(token) for token in made.tokens]
        logprobs = [max(logprob, LOWEST_LOGPROB) for logprob in made.logprobs]
        if not self._chat:
            offsets = list(accumulate((len(name) for name in names), initial=0))[:-1]
            return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}
        content = [
            {"token": name, "logprob": logprob, "bytes": list(name.encode()), "top_logprobs": []}
            for name, logprob in zip(names, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """The numbers of tokens of one request, as OpenAI's API names them."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}
