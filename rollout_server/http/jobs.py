"""Completions under way for HTTP: so many at once and no more, so that training keeps its engine.

    request --start--> task a completion --Engine.stream--> queue --> whoever answers the client

A task reads its stream without pause, whatever the client does: an update that lets requests finish first never
waits for a slow reader. It ends with the completion, with `CompletionJob.aclose` (the client left), or with `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from async_grpo.errors import EngineError
from async_grpo.utils.aio import cancel_and_wait
from async_grpo.wire import VersionSpan
from rollout_server.engines.base import Engine, GenerationRequest
from rollout_server.http.detokenizer import TextStream
from rollout_server.http.streaming import HttpError, not_ready


@dataclass(frozen=True, slots=True)
class CompletionChunk:
    """More of completion `index`: text that is settled, and the tokens that came (whose text may come later)."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    finish_reason: str


Pieces = asyncio.Queue[CompletionChunk | BaseException | None]


class CompletionJobs:
    """At most `limit` completions at once."""

    def __init__(self, engine: Engine, limit: int) -> None:
        self._engine = engine
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> int:
        """Completions under way."""
        return len(self._tasks)

    def start(self, requests: Sequence[GenerationRequest], texts: Sequence[TextStream]) -> CompletionJob:
        """Begin all of them. Raises HttpError 429 if there is no room for all."""
        if self.busy + len(requests) > self._limit:
            raise HttpError(
                429,
                f"{self.busy} completions are under way, {len(requests)} more would exceed "
                f"rollout.http.max_concurrency ({self._limit}): training comes first. Ask again later",
                code="too_many_requests",
                headers={"retry-after": "1"},
            )
        pieces: Pieces = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._write(index, request, text, pieces), name=request.request_id)
            for index, (request, text) in enumerate(zip(requests, texts, strict=True))
        ]
        for task in tasks:
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, pieces))
        return CompletionJob(pieces, tasks)

    async def finish(self, timeout_s: float) -> None:
        """Wait for those under way, then end them."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        await self.close()

    async def close(self) -> None:
        """End them all: their clients are told that the server leaves."""
        await cancel_and_wait(*self._tasks)

    async def _write(self, index: int, request: GenerationRequest, text: TextStream, pieces: Pieces) -> None:
        async with aclosing(self._engine.stream(request)) as stream:
            async for part in stream:
                more = text.push(part.tokens.tolist())
                if part.finish_reason:
                    more += text.finish()
                reason = "stop" if text.is_stopped else part.finish_reason
                piece = CompletionChunk(index, more, part.tokens.tolist(), part.logprobs.tolist(), part.spans, reason)
                pieces.put_nowait(piece)
                if text.is_stopped:
                    return

    def _ended(self, pieces: Pieces, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = not_ready("the server is stopping") if task.cancelled() else task.exception()
        if isinstance(error, EngineError):
            error = HttpError(503, f"the engine failed: {error}", code="engine_failed")
        pieces.put_nowait(error)


class CompletionJob:
    """The completions of one request. Close it, whatever happened."""

    def __init__(self, pieces: Pieces, tasks: Sequence[asyncio.Task[None]]) -> None:
        self._pieces = pieces
        self._tasks = tasks

    async def pieces(self) -> AsyncGenerator[CompletionChunk, None]:
        """As they come, those of all completions mixed. Raises HttpError if the engine fails or the server stops."""
        running = len(self._tasks)
        while running:
            piece = await self._pieces.get()
            if isinstance(piece, CompletionChunk):
                yield piece
            elif piece is not None:
                raise piece
            else:
                running -= 1

    async def aclose(self) -> None:
        """End what is still under way; vLLM forgets those requests."""
        await cancel_and_wait(*self._tasks)
