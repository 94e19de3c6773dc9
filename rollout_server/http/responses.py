"""Answers in the shapes of OpenAI's API: pure functions of the completions.

Beyond that API, every choice, and every chunk of a stream, lists in `policy_versions` which policy version wrote its
tokens: [version, start, end), counted in the tokens of that choice or chunk.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from async_grpo.wire import VersionSpan
from rollout_server.engines.base import join_spans
from rollout_server.http.jobs import CompletionChunk

LOWEST_LOGPROB = -9999.0
"""Written in place of lower values, because JSON has no infinity."""


@dataclass
class CompletionChoice:
    """One completion, assembled from its chunks."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: str = ""

    def add(self, chunk: CompletionChunk) -> None:
        """Append the next chunk."""
        self.spans = join_spans(self.spans, chunk.spans, offset=len(self.tokens))
        self.text += chunk.text
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs
        self.finish_reason = chunk.finish_reason

    @property
    def version(self) -> int | None:
        """Newest policy version that wrote a token of it; None if it has no token."""
        return max((span.version for span in self.spans), default=None)


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What the answer says of tokens beside their text."""

    logprobs: bool = False
    token_ids: bool = False


class ResponseFormat:
    """Formats the answers to one request. `CompletionFormat` and `ChatFormat` differ in the choices."""

    kind = ""
    chunk_kind = ""
    prefix = ""

    def __init__(self, model: str, name: Callable[[int], str], *, options: ResponseOptions) -> None:
        """`model`: its name in the answer. `name`: one token as text."""
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._name = name
        self._options = options

    def whole(self, choices: Sequence[CompletionChoice], prompt_tokens: int, fingerprint: str) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        bodies = [
            {
                "index": index,
                **self.choice(choice.text),
                "logprobs": self._logprobs(choice),
                "finish_reason": choice.finish_reason,
                "policy_versions": _span_lists(choice.spans),
                **self._token_ids(choice),
            }
            for index, choice in enumerate(choices)
        ]
        usage = usage_of(prompt_tokens, sum(len(choice.tokens) for choice in choices))
        return {**self._head(self.kind, fingerprint), "choices": bodies, "usage": usage}

    def chunk(self, chunk: CompletionChunk, fingerprint: str) -> dict[str, Any]:
        """One event of a stream."""
        written = CompletionChoice()
        written.add(chunk)
        body = {
            "index": chunk.index,
            **self.delta(chunk.text),
            "logprobs": self._logprobs(written),
            "finish_reason": chunk.finish_reason or None,
            "policy_versions": _span_lists(chunk.spans),
            **self._token_ids(written),
        }
        return {**self._head(self.chunk_kind, fingerprint), "choices": [body]}

    def usage(self, prompt_tokens: int, completion_tokens: int, fingerprint: str) -> dict[str, Any]:
        """The last event of a stream whose request asked for usage."""
        head = self._head(self.chunk_kind, fingerprint)
        return {**head, "choices": [], "usage": usage_of(prompt_tokens, completion_tokens)}

    def choice(self, text: str) -> dict[str, Any]:
        """The part of a choice that holds the text of a whole answer."""
        raise NotImplementedError

    def delta(self, text: str) -> dict[str, Any]:
        """The part of a choice that holds the text of a chunk."""
        raise NotImplementedError

    def logprobs(self, names: list[str], logprobs: list[float]) -> dict[str, Any]:
        """Log-probabilities of the sampled tokens; `names` are the tokens as text."""
        raise NotImplementedError

    def _head(self, kind: str, fingerprint: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": fingerprint,
        }

    def _token_ids(self, choice: CompletionChoice) -> dict[str, list[int]]:
        return {"token_ids": choice.tokens} if self._options.token_ids else {}

    def _logprobs(self, choice: CompletionChoice) -> dict[str, Any] | None:
        if not self._options.logprobs:
            return None
        names = [self._name(token) for token in choice.tokens]
        return self.logprobs(names, [max(logprob, LOWEST_LOGPROB) for logprob in choice.logprobs])


class CompletionFormat(ResponseFormat):
    """The format of /v1/completions."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def choice(self, text: str) -> dict[str, Any]:
        """The part of a choice that holds the text of a whole answer."""
        return {"text": text}

    delta = choice

    def logprobs(self, names: list[str], logprobs: list[float]) -> dict[str, Any]:
        """Log-probabilities of the sampled tokens; `names` are the tokens as text."""
        return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": _offsets(names)}


class ChatFormat(ResponseFormat):
    """The format of /v1/chat/completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def choice(self, text: str) -> dict[str, Any]:
        """The part of a choice that holds the text of a whole answer."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str) -> dict[str, Any]:
        """The part of a choice that holds the text of a chunk."""
        return {"delta": {"role": "assistant", "content": text}}

    def logprobs(self, names: list[str], logprobs: list[float]) -> dict[str, Any]:
        """Log-probabilities of the sampled tokens; `names` are the tokens as text."""
        content = [
            {"token": name, "logprob": logprob, "bytes": list(name.encode()), "top_logprobs": []}
            for name, logprob in zip(names, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """The numbers of tokens of one request, as OpenAI's API names them."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def _offsets(names: Sequence[str]) -> list[int]:
    offsets, position = [], 0
    for name in names:
        offsets.append(position)
        position += len(name)
    return offsets


def _span_lists(spans: Sequence[VersionSpan]) -> list[list[int]]:
    return [[span.version, span.start, span.end] for span in spans]
