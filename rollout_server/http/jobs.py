"""Running completions for HTTP. Their number is bounded, so that training keeps most of the engine.

    request --start_completions--> one task per completion --Engine.stream--> queue --> handler that answers the client

A task reads its stream without pause, however slow the client is. So an update that waits for running requests (drain)
never waits for a slow client. A task ends with its completion, with `CompletionJob.aclose` (the client disconnected),
or with `close`.
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
from rollout_server.http.streaming import HttpError, not_ready_error


@dataclass(slots=True)
class CompletionChunk:
    """A part of completion `index`, or all of it.

    `text` is final, and may lag behind `tokens`: their text may follow in a later chunk. `finish_reason` is "" if more
    chunks follow.
    """

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: str = ""

    def append(self, chunk: CompletionChunk) -> None:
        """Append the next chunk of this completion."""
        self.spans = join_spans(self.spans, chunk.spans, offset=len(self.tokens))
        self.text += chunk.text
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs
        self.finish_reason = chunk.finish_reason


ChunkQueue = asyncio.Queue[CompletionChunk | BaseException | None]
"""Chunks of all completions of a request; each completion ends with its error, or with None."""


class CompletionJobs:
    """All running completions, at most `limit`."""

    def __init__(self, engine: Engine, limit: int) -> None:
        self._engine = engine
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        """Number of running completions."""
        return len(self._tasks)

    def start_completions(self, requests: Sequence[GenerationRequest], texts: Sequence[TextStream]) -> CompletionJob:
        """Start all completions of a request. Raises HttpError 429, and starts none, if they exceed the limit."""
        if self.running + len(requests) > self._limit:
            raise HttpError(
                429,
                f"{self.running} completions are running, {len(requests)} more would exceed "
                f"rollout.http.max_concurrency ({self._limit}): training has priority. Retry later",
                code="too_many_requests",
                headers={"retry-after": "1"},
            )
        chunks: ChunkQueue = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._read_stream(index, request, text, chunks), name=request.request_id)
            for index, (request, text) in enumerate(zip(requests, texts, strict=True))
        ]
        for task in tasks:
            self._tasks.add(task)
            task.add_done_callback(partial(self._end_completion, chunks))
        return CompletionJob(chunks, tasks)

    async def finish_completions(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for running completions, then cancel them."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        await self.close()

    async def close(self) -> None:
        """Cancel all completions; their clients get the error that the server is stopping."""
        await cancel_and_wait(*self._tasks)

    async def _read_stream(self, index: int, request: GenerationRequest, text: TextStream, chunks: ChunkQueue) -> None:
        async with aclosing(self._engine.stream(request)) as stream:
            async for part in stream:
                tokens = part.tokens.tolist()
                new_text = text.push(tokens)
                if part.finish_reason:
                    new_text += text.finish()
                finish_reason = "stop" if text.is_stopped else part.finish_reason
                chunk = CompletionChunk(index, new_text, tokens, part.logprobs.tolist(), part.spans, finish_reason)
                chunks.put_nowait(chunk)
                if text.is_stopped:
                    return  # closing the stream aborts the request

    def _end_completion(self, chunks: ChunkQueue, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = not_ready_error("the server is stopping") if task.cancelled() else task.exception()
        if isinstance(error, EngineError):
            error = HttpError(503, f"the engine failed: {error}", code="engine_failed")
        elif isinstance(error, RequestRefused):
            error = HttpError(400, f"the engine refused this request: {error}", code="request_refused")
        chunks.put_nowait(error)


class CompletionJob:
    """Completions of one request. Always call `aclose`, also after an error."""

    def __init__(self, chunks: ChunkQueue, tasks: Sequence[asyncio.Task[None]]) -> None:
        self._chunks = chunks
        self._tasks = tasks

    async def read_chunks(self) -> AsyncGenerator[CompletionChunk, None]:
        """Yield chunks of all completions as they arrive. Raises HttpError if the engine fails or the server stops."""
        running = len(self._tasks)
        while running:
            item = await self._chunks.get()
            if isinstance(item, CompletionChunk):
                yield item
            elif item is not None:
                raise item
            else:
                running -= 1

    async def aclose(self) -> None:
        """Cancel completions that are still running; the engine aborts their requests."""
        await cancel_and_wait(*self._tasks)
