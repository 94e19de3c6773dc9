"""/v1: completions of the current policy, compatible with OpenAI's clients.

    body --> PromptEncoder --> CompletionJobs --> chunks --> ResponseFormat --> JSON, or server-sent events

A request waits for its body, then for its chunks, which the engine unblocks; it ends early if the client disconnects or
its deadline passes. A stream starts with its first chunk: an error before that gets an error status.

The fingerprint of a response, also in its header `x-policy-version`, is "epoch-version" of the newest weights that
generated one of its tokens. The header of a stream is that of its first chunk, and every chunk has its own fingerprint.
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
from rollout_server.http.requests import Body, ChatBody, CompletionBody, Sampling, parse_body
from rollout_server.http.responses import ResponseFormat
from rollout_server.http.streaming import EventStream, HttpError, read_json_body, run_while_connected

VERSION_HEADER = "x-policy-version"


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A checked request: prompts as token ids, sampling parameters, and the format of the response."""

    prompts: Sequence[list[int]]
    sampling: Sampling
    max_tokens: int | None
    format: ResponseFormat

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts; each prompt counts once, also with several completions."""
        return sum(len(prompt) for prompt in self.prompts)


def completion_routes(http: HttpContext) -> APIRouter:
    """Routes /v1/models, /v1/completions and /v1/chat/completions. All need the key, if one is set."""
    api = CompletionApi(http)

    async def check_key(request: Request) -> None:
        http.keys.check_completions_key(request.headers.get("authorization", ""))

    routes = APIRouter(prefix="/v1", dependencies=[Depends(check_key)])
    routes.add_api_route("/models", api.list_models, methods=["GET"])
    routes.add_api_route("/completions", api.create_completions, methods=["POST"])
    routes.add_api_route("/chat/completions", api.create_chat_completions, methods=["POST"])
    return routes


class CompletionApi:
    """Handlers of /v1. All raise HttpError: 503 if the server is not ready, 4xx for an invalid request."""

    def __init__(self, http: HttpContext) -> None:
        self._http = http
        self._limits = http.config.rollout.http
        self._numbers = count(1)

    async def list_models(self) -> JSONResponse:
        """List the one model of this server, with the policy version of its weights."""
        server = self._http.require_ready()
        model = {"id": self._http.config.name, "object": "model", "created": 0, "owned_by": "async-grpo"}
        return JSONResponse({"object": "list", "data": [{**model, "policy_version": server.policy_version}]})

    async def create_completions(self, request: Request) -> Response:
        """Complete one or more prompts."""
        body = await self._read_body(request, CompletionBody)
        self._check_body(body, prompts=len(body.prompts))
        prompts = [await self._http.prompts.encode_text(prompt) for prompt in body.prompts]
        completion = CompletionRequest(prompts, body, body.max_tokens, self._response_format(body, chat=False))
        return await self._respond(request, completion)

    async def create_chat_completions(self, request: Request) -> Response:
        """Complete a conversation."""
        body = await self._read_body(request, ChatBody)
        self._check_body(body, prompts=1)
        prompt = await self._http.prompts.encode_chat(body.messages)
        max_tokens = body.max_completion_tokens or body.max_tokens
        completion = CompletionRequest([prompt], body, max_tokens, self._response_format(body, chat=True))
        return await self._respond(request, completion)

    async def _read_body(self, request: Request, kind: type[Body]) -> Body:
        self._http.require_ready()  # do not receive a large body only to refuse it
        return parse_body(kind, await read_json_body(request, self._limits.max_body_bytes))

    def _check_body(self, body: Sampling, *, prompts: int) -> None:
        if body.model not in (None, self._http.config.name):
            raise HttpError(404, f"the model of this server is {self._http.config.name!r}", code="model_not_found")
        if not 1 <= prompts * body.n <= self._limits.max_completions_per_request:
            raise HttpError(
                400,
                f"prompts ({prompts}) times n ({body.n}) must be from 1 to {self._limits.max_completions_per_request} "
                "(rollout.http.max_n, rollout.http.max_concurrency). Send the rest in other requests",
            )

    def _response_format(self, body: Sampling, *, chat: bool) -> ResponseFormat:
        return ResponseFormat(
            self._http.config.name,
            self._http.prompts.decode_token,
            chat=chat,
            logprobs=body.wants_logprobs,
            token_ids=body.return_token_ids,
        )

    async def _respond(self, request: Request, completion: CompletionRequest) -> Response:
        prompts = [prompt for prompt in completion.prompts for _ in range(completion.sampling.n)]
        requests = [self._engine_request(completion, prompt, index) for index, prompt in enumerate(prompts)]
        server = self._http.require_ready()
        texts = [TextStream(self._http.prompts.decode, completion.sampling.stops) for _ in requests]
        job = server.jobs.start_completions(requests, texts)
        if completion.sampling.stream:
            return await self._start_stream(request, completion, server, job)
        try:
            work = _collect_response(completion, server, job, len(requests))
            return await run_while_connected(request.receive, work, self._limits.request_timeout_s)
        finally:
            await job.aclose()

    def _engine_request(self, completion: CompletionRequest, prompt: list[int], index: int) -> GenerationRequest:
        """The engine's request for completion `index`."""
        sampling = completion.sampling
        temperature = sampling.temperature
        if temperature is None:
            temperature = self._http.config.sampling.temperature
        seed = None
        if sampling.seed is not None:
            seed = offset_seed(sampling.seed, index)  # with one seed, all completions of a prompt would be the same
        return GenerationRequest(
            request_id=f"http-{next(self._numbers)}",
            prompt=prompt,
            max_tokens=self._check_max_tokens(
                completion.max_tokens, room=self._http.prompts.max_completion_tokens(prompt)
            ),
            temperature=temperature,
            seed=seed,
            interruptible=False,
        )

    def _check_max_tokens(self, requested: int | None, *, room: int) -> int:
        """Return the token limit of a completion; `room` is what the engine's context has left after the prompt."""
        config = self._http.config
        limit = self._limits.max_tokens
        engine = config.rollout.limits
        if requested is None:
            return min(config.sampling.max_tokens, limit, room)
        if requested > limit:
            raise HttpError(400, f"max_tokens: {requested} is above rollout.http.max_tokens ({limit})")
        if requested > room:
            raise HttpError(
                400,
                f"max_tokens: {requested} do not fit: after this prompt there is room for {room} within "
                f"{engine.length_key} ({engine.max_length}). Request fewer",
                code="context_length_exceeded",
            )
        return requested

    async def _start_stream(
        self, request: Request, completion: CompletionRequest, server: ReadyServer, job: CompletionJob
    ) -> Response:
        """Wait for the first chunk, then return the response that streams all."""
        chunks = job.read_chunks()
        timeout_s = self._limits.request_timeout_s
        try:
            first = await run_while_connected(request.receive, _read_first(chunks), timeout_s)
        except BaseException:
            await job.aclose()
            raise
        events = _stream_events(completion, server, first, chunks)
        headers = {VERSION_HEADER: _fingerprint(server, first)}
        return EventStream(events, headers, close=job.aclose, timeout_s=timeout_s)


async def _collect_response(
    completion: CompletionRequest, server: ReadyServer, job: CompletionJob, count: int
) -> Response:
    """Wait for all chunks and return them as one JSON response."""
    choices = [CompletionChunk(index) for index in range(count)]
    async with aclosing(job.read_chunks()) as chunks:
        async for chunk in chunks:
            choices[chunk.index].append(chunk)
    fingerprint = _fingerprint(server, *choices)
    body = completion.format.response_body(choices, completion.prompt_tokens, fingerprint)
    return JSONResponse(body, headers={VERSION_HEADER: fingerprint})


async def _read_first(chunks: AsyncGenerator[CompletionChunk, None]) -> CompletionChunk:
    return await anext(chunks)


async def _stream_events(
    completion: CompletionRequest,
    server: ReadyServer,
    first: CompletionChunk,
    rest: AsyncGenerator[CompletionChunk, None],
) -> AsyncGenerator[dict[str, Any], None]:
    tokens = len(first.tokens)
    fingerprint = _fingerprint(server, first)
    yield completion.format.chunk_event(first, fingerprint)

    async for chunk in rest:
        tokens += len(chunk.tokens)
        fingerprint = _fingerprint(server, chunk)
        yield completion.format.chunk_event(chunk, fingerprint)
    if completion.sampling.wants_usage:
        yield completion.format.usage_event(completion.prompt_tokens, tokens, fingerprint)


def _fingerprint(server: ReadyServer, *chunks: CompletionChunk) -> str:
    """ "epoch-version" of the newest weights that generated a token; of the engine's weights if there is no token."""
    versions = [span.version for chunk in chunks for span in chunk.spans]
    return server.format_version(max(versions, default=server.context.engine.version))
