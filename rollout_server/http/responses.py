"""Responses in the format of OpenAI's API: pure functions of the completions.

Extension of that API: every choice, and every chunk of a stream, has `policy_versions`, the policy version per range of
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
"""Replaces lower values, because JSON has no infinity."""


class ResponseFormat:
    """Formats the responses to one request of /v1/completions or (`chat`) /v1/chat/completions."""

    def __init__(
        self,
        model: str,
        decode_token: Callable[[int], str],
        *,
        chat: bool,
        logprobs: bool = False,
        token_ids: bool = False,
    ) -> None:
        """`logprobs` and `token_ids` add these to every choice."""
        self._chat = chat
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._decode_token = decode_token
        self._with_logprobs = logprobs
        self._with_token_ids = token_ids

    def response_body(self, choices: Sequence[CompletionChunk], prompt_tokens: int, fingerprint: str) -> dict[str, Any]:
        """Body of a response that is not streamed."""
        return {
            **self._head,
            "system_fingerprint": fingerprint,
            "choices": [self._choice(choice, self._message(choice.text)) for choice in choices],
            "usage": token_usage(prompt_tokens, sum(len(choice.tokens) for choice in choices)),
        }

    def chunk_event(self, chunk: CompletionChunk, fingerprint: str) -> dict[str, Any]:
        """Event of a stream for a chunk."""
        text: dict[str, Any] = {"text": chunk.text}
        if self._chat:
            text = {"delta": {"role": "assistant", "content": chunk.text}}
        return self._event([self._choice(chunk, text)], fingerprint)

    def usage_event(self, prompt_tokens: int, completion_tokens: int, fingerprint: str) -> dict[str, Any]:
        """Last event of a stream, if the request has `include_usage`."""
        return {**self._event([], fingerprint), "usage": token_usage(prompt_tokens, completion_tokens)}

    def _event(self, choices: list[dict[str, Any]], fingerprint: str) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "system_fingerprint": fingerprint, "choices": choices}

    def _message(self, text: str) -> dict[str, Any]:
        if self._chat:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"text": text}

    def _choice(self, completion: CompletionChunk, text: dict[str, Any]) -> dict[str, Any]:
        choice = {
            "index": completion.index,
            **text,
            "logprobs": self._logprobs(completion) if self._with_logprobs else None,
            "finish_reason": completion.finish_reason or None,
            "policy_versions": [[span.version, span.start, span.end] for span in completion.spans],
        }
        if self._with_token_ids:
            choice["token_ids"] = completion.tokens
        return choice

    def _logprobs(self, completion: CompletionChunk) -> dict[str, Any]:
        texts = [self._decode_token(token) for token in completion.tokens]
        logprobs = [max(logprob, LOWEST_LOGPROB) for logprob in completion.logprobs]
        if not self._chat:
            offsets = list(accumulate((len(text) for text in texts), initial=0))[:-1]
            return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}
        content = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


def token_usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Numbers of tokens of one request, with the keys of OpenAI's API."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}
