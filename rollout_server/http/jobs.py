"""Completions under way for HTTP. Their number is bounded, so that training keeps most of the engine.

    request --start--> one task per completion --Engine.stream--> queue --> handler that answers the client

A task reads its stream without pause, however slowly the client reads, so an update that lets requests finish first
never waits for a slow reader. The task ends with the completion, with `CompletionJob.aclose` (the client left), or with
`close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from async_grpo.errors import EngineError, RequestRefused
from async_grpo.utils.aio import cancel_and_wait
from async_grpo.wire import VersionSpan
from rollout_server.engines.base import Engine, GenerationRequest, join_spans
from rollout_server.http.detokenizer import TextStream
from rollout_server.http.streaming import HttpError, not_ready


@dataclass(slots=True)
class CompletionChunk:
    """A part of completion `index`, or all of it: settled text, and the tokens that came, whose text may come later.
    Empty `finish_reason`: more follows."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: str = ""

    def add(self, more: CompletionChunk) -> None:
        """Append the next chunk."""
        self.spans = join_spans(self.spans, more.spans, offset=len(self.tokens))
        self.text += more.text
        self.tokens += more.tokens
        self.logprobs += more.logprobs
        self.finish_reason = more.finish_reason


ChunkQueue = asyncio.Queue[CompletionChunk | BaseException | None]
"""Chunks of all completions of a request, and for each completion at its end an error, or None if there is none."""


class CompletionJobs:
    """All completions under way, at most `limit` at once."""

    def __init__(self, engine: Engine, limit: int) -> None:
        self._engine = engine
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> int:
        """Number of completions under way."""
        return len(self._tasks)

    def start(self, requests: Sequence[GenerationRequest], texts: Sequence[TextStream]) -> CompletionJob:
        """Start all completions of a request. Raises HttpError 429, and starts none, if there is no room for all."""
        if self.busy + len(requests) > self._limit:
            raise HttpError(
                429,
                f"{self.busy} completions are under way, {len(requests)} more would exceed "
                f"rollout.http.max_concurrency ({self._limit}): training comes first. Ask again later",
                code="too_many_requests",
                headers={"retry-after": "1"},
            )
        chunks: ChunkQueue = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._write(index, request, text, chunks), name=request.request_id)
            for index, (request, text) in enumerate(zip(requests, texts, strict=True))
        ]
        for task in tasks:
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, chunks))
        return CompletionJob(chunks, tasks)

    async def finish(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for completions under way, then end them."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        await self.close()

    async def close(self) -> None:
        """End all completions; their clients are told that the server is stopping."""
        await cancel_and_wait(*self._tasks)

    async def _write(self, index: int, request: GenerationRequest, text: TextStream, chunks: ChunkQueue) -> None:
        async with aclosing(self._engine.stream(request)) as stream:
            async for part in stream:
                more = text.push(part.tokens.tolist())
                if part.finish_reason:
                    more += text.finish()
                reason = "stop" if text.is_stopped else part.finish_reason
                chunk = CompletionChunk(index, more, part.tokens.tolist(), part.logprobs.tolist(), part.spans, reason)
                chunks.put_nowait(chunk)
                if text.is_stopped:
                    return

    def _ended(self, chunks: ChunkQueue, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = not_ready("the server is stopping") if task.cancelled() else task.exception()
        if isinstance(error, EngineError):
            error = HttpError(503, f"the engine failed: {error}", code="engine_failed")
        elif isinstance(error, RequestRefused):
            error = HttpError(400, f"the engine cannot take this request: {error}", code="request_refused")
        chunks.put_nowait(error)


class CompletionJob:
    """The completions of one request. Call `aclose` in any case."""

    def __init__(self, chunks: ChunkQueue, tasks: Sequence[asyncio.Task[None]]) -> None:
        self._chunks = chunks
        self._tasks = tasks

    async def chunks(self) -> AsyncGenerator[CompletionChunk, None]:
        """Chunks of all completions as they come. Raises HttpError if the engine fails or the server stops."""
        running = len(self._tasks)
        while running:
            chunk = await self._chunks.get()
            if isinstance(chunk, CompletionChunk):
                yield chunk
            elif chunk is not None:
                raise chunk
            else:
                running -= 1

    async def aclose(self) -> None:
        """End completions that are still under way; the engine aborts their requests."""
        await cancel_and_wait(*self._tasks)
