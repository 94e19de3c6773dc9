"""/v1: completions of the current policy, as OpenAI's clients ask for them.

    body --> Prompts --> Writers --> pieces --> Form --> JSON, or server-sent events

The fingerprint of an answer, and its header `x-policy-version`, is "epoch-version" of the newest weights that wrote
a token of it; of a stream, the header is of its first piece and every piece has a fingerprint of its own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response

from rollout_server.engines.base import GenerationRequest
from rollout_server.http.context import HttpContext, ReadyServer
from rollout_server.http.detokenizer import TextStream
from rollout_server.http.jobs import CompletionChunk, CompletionJob
from rollout_server.http.requests import ChatBody, CompletionBody, Sampling, parse
from rollout_server.http.responses import (
    ChatFormat,
    CompletionChoice,
    CompletionFormat,
    ResponseFormat,
    ResponseOptions,
)
from rollout_server.http.streaming import EventStream, HttpError, read_json, unless_gone

VERSION_HEADER = "x-policy-version"


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """What a request comes to: its prompts, what is asked of each, and how the answer looks."""

    prompts: Sequence[list[int]]
    sampling: Sampling
    form: ResponseFormat

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(len(prompt) for prompt in self.prompts)


def completion_routes(http: HttpContext) -> APIRouter:
    """/v1/models, /v1/completions, /v1/chat/completions."""
    bound = http.config.rollout.http
    numbers = count(1)

    async def key(request: Request) -> None:
        http.keys.admit_to_completions(request.headers.get("authorization", ""))

    routes = APIRouter(prefix="/v1", dependencies=[Depends(key)])

    @routes.get("/models")
    async def models() -> JSONResponse:
        server = http.ready()
        model = {"id": http.config.name, "object": "model", "created": 0, "owned_by": "async-grpo"}
        return JSONResponse({"object": "list", "data": [{**model, "policy_version": server.policy}]})

    @routes.post("/completions")
    async def completions(request: Request) -> Response:
        http.ready()
        body = parse(CompletionBody, await read_json(request, bound.max_body_bytes))
        _check(body, prompts=len(body.prompts))
        prompts = [await http.prompts.of_text(prompt) for prompt in body.prompts]
        form = CompletionFormat(http.config.name, http.prompts.name, options=_options(body))
        return await _answer(request, CompletionRequest(prompts, body, form), body.max_tokens)

    @routes.post("/chat/completions")
    async def chat(request: Request) -> Response:
        http.ready()
        body = parse(ChatBody, await read_json(request, bound.max_body_bytes))
        _check(body, prompts=1)
        prompt = await http.prompts.of_chat(body.messages)
        form = ChatFormat(http.config.name, http.prompts.name, options=_options(body))
        return await _answer(
            request, CompletionRequest([prompt], body, form), body.max_completion_tokens or body.max_tokens
        )

    def _check(body: Sampling, *, prompts: int) -> None:
        if body.model not in (None, http.config.name):
            raise HttpError(404, f"the model of this server is {http.config.name!r}", code="model_not_found")
        if not 1 <= prompts * body.n <= bound.most_completions:
            raise HttpError(
                400,
                f"prompts ({prompts}) times n ({body.n}) must be from 1 to {bound.most_completions} "
                "(rollout.http.max_n, rollout.http.max_concurrency). Ask for the rest in other requests",
            )

    async def _answer(request: Request, order: CompletionRequest, max_tokens: int | None) -> Response:
        requests = [
            _generation(order.sampling, prompt, index, max_tokens)
            for index, prompt in enumerate(prompt for prompt in order.prompts for _ in range(order.sampling.n))
        ]
        server = http.ready()
        texts = [TextStream(http.prompts.decode, order.sampling.stops) for _ in requests]
        job = server.jobs.start(requests, texts)
        if order.sampling.stream:
            return await _streamed(request, order, server, job)
        try:
            work = _whole(order, server, job, len(requests))
            return await unless_gone(request.receive, work, bound.request_timeout_s)
        finally:
            await job.aclose()

    def _generation(sampling: Sampling, prompt: list[int], index: int, max_tokens: int | None) -> GenerationRequest:
        config = http.config.sampling
        temperature = config.temperature if sampling.temperature is None else sampling.temperature
        return GenerationRequest(
            request_id=f"http-{next(numbers)}",
            prompt=prompt,
            max_tokens=_bounded(max_tokens, room=http.prompts.room(prompt)),
            temperature=temperature,
            seed=None if sampling.seed is None else sampling.seed + index,
            interruptible=False,
        )

    def _bounded(asked: int | None, *, room: int) -> int:
        if asked is None:
            return min(http.config.sampling.max_tokens, bound.max_tokens, room)
        if asked > bound.max_tokens:
            raise HttpError(400, f"max_tokens: {asked} is above rollout.http.max_tokens ({bound.max_tokens})")
        if asked > room:
            raise HttpError(
                400,
                f"max_tokens: {asked} do not fit: beside this prompt there is room for {room} within "
                f"rollout.vllm.max_model_len ({http.config.rollout.vllm.max_model_len}). Ask for less",
                code="context_length_exceeded",
            )
        return asked

    async def _streamed(
        request: Request, order: CompletionRequest, server: ReadyServer, job: CompletionJob
    ) -> Response:
        """The first piece is waited for: until then, an error still has a status."""
        pieces = job.pieces()
        try:
            first = await unless_gone(request.receive, _first_of(pieces), bound.request_timeout_s)
        except BaseException:
            await job.aclose()
            raise
        events = _events(order, server, first, pieces)
        headers = {VERSION_HEADER: _fingerprint(server, first)}
        return EventStream(events, headers, close=job.aclose, timeout_s=bound.request_timeout_s)

    return routes


def _options(body: Sampling) -> ResponseOptions:
    return ResponseOptions(logprobs=body.wants_logprobs, token_ids=body.return_token_ids)


async def _whole(order: CompletionRequest, server: ReadyServer, job: CompletionJob, count: int) -> Response:
    choices = [CompletionChoice() for _ in range(count)]
    async with aclosing(job.pieces()) as pieces:
        async for piece in pieces:
            choices[piece.index].add(piece)
    versions = [choice.version for choice in choices if choice.version is not None]
    fingerprint = server.identity_of(max(versions, default=server.context.engine.version))
    body = order.form.whole(choices, order.prompt_tokens, fingerprint)
    return JSONResponse(body, headers={VERSION_HEADER: fingerprint})


async def _first_of(pieces: AsyncGenerator[CompletionChunk, None]) -> CompletionChunk:
    return await anext(pieces)


async def _events(
    order: CompletionRequest,
    server: ReadyServer,
    first: CompletionChunk,
    rest: AsyncGenerator[CompletionChunk, None],
) -> AsyncGenerator[dict[str, Any], None]:
    tokens, fingerprint = len(first.tokens), _fingerprint(server, first)
    yield order.form.piece(first, fingerprint)
    async for piece in rest:
        tokens, fingerprint = tokens + len(piece.tokens), _fingerprint(server, piece)
        yield order.form.piece(piece, fingerprint)
    if order.sampling.wants_usage:
        yield order.form.usage(order.prompt_tokens, tokens, fingerprint)


def _fingerprint(server: ReadyServer, piece: CompletionChunk) -> str:
    versions = [span.version for span in piece.spans]
    return server.identity_of(max(versions, default=server.context.engine.version))
