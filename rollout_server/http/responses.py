"""Answers in the shapes of OpenAI's API: pure functions of what was written.

Beyond that API, every choice (and every streamed piece) says in `policy_versions` which policy version its tokens
come from: [version, start, end), counted in the tokens of that choice (of that piece).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from async_grpo.wire import VersionSpan
from rollout_server.http.jobs import CompletionChunk

LOWEST_LOGPROB = -9999.0
"""JSON has no infinity."""


@dataclass
class CompletionChoice:
    """One completion, put together from its pieces."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: str = ""

    def add(self, piece: CompletionChunk) -> None:
        """What follows."""
        offset = len(self.tokens)
        for span in piece.spans:
            if self.spans and self.spans[-1].version == span.version:
                self.spans[-1] = VersionSpan(span.version, self.spans[-1].start, offset + span.end)
            else:
                self.spans.append(VersionSpan(span.version, offset + span.start, offset + span.end))
        self.text += piece.text
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.finish_reason = piece.finish_reason

    @property
    def version(self) -> int | None:
        """The newest that wrote a token of it."""
        return max((span.version for span in self.spans), default=None)


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What is told of the tokens beside their text."""

    logprobs: bool = False
    token_ids: bool = False


class ResponseFormat:
    """How answers to one request look; `CompletionFormat` and `ChatFormat` differ in the choices."""

    kind = ""
    piece_kind = ""
    prefix = ""

    def __init__(self, model: str, name: Callable[[int], str], *, options: ResponseOptions) -> None:
        """`name`: one token as text."""
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._name = name
        self._options = options

    def whole(self, choices: Sequence[CompletionChoice], prompt_tokens: int, fingerprint: str) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        bodies = [
            {
                "index": index,
                **self.choice(choice.text),
                "logprobs": self._logprobs(choice),
                "finish_reason": choice.finish_reason,
                "policy_versions": _plain(choice.spans),
                **self._token_ids(choice),
            }
            for index, choice in enumerate(choices)
        ]
        usage = usage_of(prompt_tokens, sum(len(choice.tokens) for choice in choices))
        return {**self._head(self.kind, fingerprint), "choices": bodies, "usage": usage}

    def piece(self, piece: CompletionChunk, fingerprint: str) -> dict[str, Any]:
        """One event of a stream."""
        written = CompletionChoice()
        written.add(piece)
        body = {
            "index": piece.index,
            **self.delta(piece.text),
            "logprobs": self._logprobs(written),
            "finish_reason": piece.finish_reason or None,
            "policy_versions": _plain(piece.spans),
            **self._token_ids(written),
        }
        return {**self._head(self.piece_kind, fingerprint), "choices": [body]}

    def usage(self, prompt_tokens: int, completion_tokens: int, fingerprint: str) -> dict[str, Any]:
        """The last event of a stream that was asked to count."""
        head = self._head(self.piece_kind, fingerprint)
        return {**head, "choices": [], "usage": usage_of(prompt_tokens, completion_tokens)}

    def choice(self, text: str) -> dict[str, Any]:
        """Where the text of a whole answer goes."""
        raise NotImplementedError

    def delta(self, text: str) -> dict[str, Any]:
        """Where the text of a piece goes."""
        raise NotImplementedError

    def logprobs(self, names: list[str], logprobs: list[float]) -> dict[str, Any]:
        """Of the sampled tokens."""
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
    """/v1/completions."""

    kind = piece_kind = "text_completion"
    prefix = "cmpl"

    def choice(self, text: str) -> dict[str, Any]:
        """Where the text of a whole answer goes."""
        return {"text": text}

    delta = choice

    def logprobs(self, names: list[str], logprobs: list[float]) -> dict[str, Any]:
        """Of the sampled tokens."""
        return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": _offsets(names)}


class ChatFormat(ResponseFormat):
    """/v1/chat/completions."""

    kind, piece_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def choice(self, text: str) -> dict[str, Any]:
        """Where the text of a whole answer goes."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str) -> dict[str, Any]:
        """Where the text of a piece goes."""
        return {"delta": {"role": "assistant", "content": text}}

    def logprobs(self, names: list[str], logprobs: list[float]) -> dict[str, Any]:
        """Of the sampled tokens."""
        content = [
            {"token": name, "logprob": logprob, "bytes": list(name.encode()), "top_logprobs": []}
            for name, logprob in zip(names, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Tokens of one request."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def _offsets(names: Sequence[str]) -> list[int]:
    offsets, position = [], 0
    for name in names:
        offsets.append(position)
        position += len(name)
    return offsets


def _plain(spans: Sequence[VersionSpan]) -> list[list[int]]:
    return [[span.version, span.start, span.end] for span in spans]
