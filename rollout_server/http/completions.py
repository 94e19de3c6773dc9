"""/v1: completions of the current policy, as OpenAI's clients ask for them.

    body --> PromptEncoder --> CompletionJobs --> chunks --> ResponseFormat --> JSON, or server-sent events

A request waits for its body, then for its chunks, which the engine unblocks; it ends early if the client leaves or its
deadline passes. Until the first chunk of a stream is there, an error is still answered with its own status.

The fingerprint of an answer, and its header `x-policy-version`, is "epoch-version" of the newest weights that wrote
a token of it. The header of a stream is that of its first chunk, and every chunk has a fingerprint of its own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response

from rollout_server.engines.base import GenerationRequest, offset_seed
from rollout_server.http.context import HttpContext, ReadyServer
from rollout_server.http.detokenizer import TextStream
from rollout_server.http.jobs import CompletionChunk, CompletionJob
from rollout_server.http.requests import Body, ChatBody, CompletionBody, Sampling, parse
from rollout_server.http.responses import ResponseFormat
from rollout_server.http.streaming import EventStream, HttpError, read_json, unless_gone

VERSION_HEADER = "x-policy-version"


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A checked request: its prompts as token ids, what is asked of each, and the format of the answer."""

    prompts: Sequence[list[int]]
    sampling: Sampling
    max_tokens: int | None
    format: ResponseFormat

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts, each prompt counted once."""
        return sum(len(prompt) for prompt in self.prompts)


def completion_routes(http: HttpContext) -> APIRouter:
    """The routes /v1/models, /v1/completions and /v1/chat/completions. All need the key, if one is set."""
    api = CompletionApi(http)

    async def key(request: Request) -> None:
        http.keys.admit_to_completions(request.headers.get("authorization", ""))

    routes = APIRouter(prefix="/v1", dependencies=[Depends(key)])
    routes.add_api_route("/models", api.models, methods=["GET"])
    routes.add_api_route("/completions", api.completions, methods=["POST"])
    routes.add_api_route("/chat/completions", api.chat, methods=["POST"])
    return routes


class CompletionApi:
    """The handlers of /v1. Each raises HttpError: 503 if the server is not ready, 4xx for what it cannot do."""

    def __init__(self, http: HttpContext) -> None:
        self._http = http
        self._limits = http.config.rollout.http
        self._numbers = count(1)

    async def models(self) -> JSONResponse:
        """The one model of this server, with the policy version of its weights."""
        server = self._http.ready()
        model = {"id": self._http.config.name, "object": "model", "created": 0, "owned_by": "async-grpo"}
        return JSONResponse({"object": "list", "data": [{**model, "policy_version": server.policy}]})

    async def completions(self, request: Request) -> Response:
        """Completions of one or more prompts."""
        body = await self._read(request, CompletionBody)
        self._check(body, prompts=len(body.prompts))
        prompts = [await self._http.prompts.encode_text(prompt) for prompt in body.prompts]
        return await self._answer(
            request, CompletionRequest(prompts, body, body.max_tokens, self._format(body, chat=False))
        )

    async def chat(self, request: Request) -> Response:
        """Completions of a conversation."""
        body = await self._read(request, ChatBody)
        self._check(body, prompts=1)
        prompt = await self._http.prompts.encode_chat(body.messages)
        max_tokens = body.max_completion_tokens or body.max_tokens
        return await self._answer(request, CompletionRequest([prompt], body, max_tokens, self._format(body, chat=True)))

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        self._http.ready()
        return parse(kind, await read_json(request, self._limits.max_body_bytes))

    def _check(self, body: Sampling, *, prompts: int) -> None:
        if body.model not in (None, self._http.config.name):
            raise HttpError(404, f"the model of this server is {self._http.config.name!r}", code="model_not_found")
        if not 1 <= prompts * body.n <= self._limits.max_completions_per_request:
            raise HttpError(
                400,
                f"prompts ({prompts}) times n ({body.n}) must be from 1 to {self._limits.max_completions_per_request} "
                "(rollout.http.max_n, rollout.http.max_concurrency). Ask for the rest in other requests",
            )

    def _format(self, body: Sampling, *, chat: bool) -> ResponseFormat:
        return ResponseFormat(
            self._http.config.name,
            self._http.prompts.name,
            chat=chat,
            logprobs=body.wants_logprobs,
            token_ids=body.return_token_ids,
        )

    async def _answer(self, request: Request, asked: CompletionRequest) -> Response:
        prompts = [prompt for prompt in asked.prompts for _ in range(asked.sampling.n)]
        requests = [self._generation(asked, prompt, index) for index, prompt in enumerate(prompts)]
        server = self._http.ready()
        texts = [TextStream(self._http.prompts.decode, asked.sampling.stops) for _ in requests]
        job = server.jobs.start(requests, texts)
        if asked.sampling.stream:
            return await self._streamed(request, asked, server, job)
        try:
            work = _whole(asked, server, job, len(requests))
            return await unless_gone(request.receive, work, self._limits.request_timeout_s)
        finally:
            await job.aclose()

    def _generation(self, asked: CompletionRequest, prompt: list[int], index: int) -> GenerationRequest:
        """The engine's request for completion `index`. A given seed is raised by the index."""
        sampling = asked.sampling
        default = self._http.config.sampling.temperature
        return GenerationRequest(
            request_id=f"http-{next(self._numbers)}",
            prompt=prompt,
            max_tokens=self._bounded(asked.max_tokens, room=self._http.prompts.room(prompt)),
            temperature=default if sampling.temperature is None else sampling.temperature,
            seed=None if sampling.seed is None else offset_seed(sampling.seed, index),
            interruptible=False,
        )

    def _bounded(self, asked: int | None, *, room: int) -> int:
        config, limit = self._http.config, self._limits.max_tokens
        engine = config.rollout.limits
        if asked is None:
            return min(config.sampling.max_tokens, limit, room)
        if asked > limit:
            raise HttpError(400, f"max_tokens: {asked} is above rollout.http.max_tokens ({limit})")
        if asked > room:
            raise HttpError(
                400,
                f"max_tokens: {asked} do not fit: beside this prompt there is room for {room} within "
                f"{engine.length_key} ({engine.max_length}). Ask for less",
                code="context_length_exceeded",
            )
        return asked

    async def _streamed(
        self, request: Request, asked: CompletionRequest, server: ReadyServer, job: CompletionJob
    ) -> Response:
        """A response that starts with the first chunk."""
        chunks, timeout_s = job.chunks(), self._limits.request_timeout_s
        try:
            first = await unless_gone(request.receive, _first_of(chunks), timeout_s)
        except BaseException:
            await job.aclose()
            raise
        events = _events(asked, server, first, chunks)
        headers = {VERSION_HEADER: _fingerprint(server, first)}
        return EventStream(events, headers, close=job.aclose, timeout_s=timeout_s)


async def _whole(asked: CompletionRequest, server: ReadyServer, job: CompletionJob, count: int) -> Response:
    choices = [CompletionChunk(index) for index in range(count)]
    async with aclosing(job.chunks()) as chunks:
        async for chunk in chunks:
            choices[chunk.index].add(chunk)
    fingerprint = _fingerprint(server, *choices)
    body = asked.format.whole(choices, asked.prompt_tokens, fingerprint)
    return JSONResponse(body, headers={VERSION_HEADER: fingerprint})


async def _first_of(chunks: AsyncGenerator[CompletionChunk, None]) -> CompletionChunk:
    return await anext(chunks)


async def _events(
    asked: CompletionRequest, server: ReadyServer, first: CompletionChunk, rest: AsyncGenerator[CompletionChunk, None]
) -> AsyncGenerator[dict[str, Any], None]:
    tokens, fingerprint = len(first.tokens), _fingerprint(server, first)
    yield asked.format.chunk(first, fingerprint)
    async for chunk in rest:
        tokens, fingerprint = tokens + len(chunk.tokens), _fingerprint(server, chunk)
        yield asked.format.chunk(chunk, fingerprint)
    if asked.sampling.wants_usage:
        yield asked.format.usage(asked.prompt_tokens, tokens, fingerprint)


def _fingerprint(server: ReadyServer, *chunks: CompletionChunk) -> str:
    versions = [span.version for chunk in chunks for span in chunk.spans]
    return server.identity_of(max(versions, default=server.context.engine.version))
