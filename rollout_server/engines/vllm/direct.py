"""vLLM fed by plain loops, without a server: the baseline that benches compare a rollout server with.

    continuous  `concurrency` loops, each with one request after the other
    waves       `concurrency` requests, wait for all of them, the next ones

Both wait for vLLM only, and sample as `VllmEngine` does, log-probabilities included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.vllm.requests import sampling_params

Loop = Callable[[Any, Sequence[GenerationRequest], int], Awaitable[list[int]]]
"""`continuous` or `waves`."""


async def continuous(async_llm: Any, requests: Sequence[GenerationRequest], concurrency: int) -> list[int]:
    """Number of tokens of every completion, in the order of the requests. Requests start in that order, too."""
    tokens, left = [0] * len(requests), iter(enumerate(requests))

    async def feed() -> None:
        for place, request in left:
            tokens[place] = await complete(async_llm, request)

    async with asyncio.TaskGroup() as loops:
        for _ in range(concurrency):
            loops.create_task(feed())
    return tokens


async def waves(async_llm: Any, requests: Sequence[GenerationRequest], concurrency: int) -> list[int]:
    """Like `continuous`, but a request starts only when all requests of the wave before it have ended."""
    tokens: list[int] = []
    for first in range(0, len(requests), concurrency):
        wave = requests[first : first + concurrency]
        tokens += await asyncio.gather(*(complete(async_llm, request) for request in wave))
    return tokens


async def complete(async_llm: Any, request: GenerationRequest) -> int:
    """Number of tokens of one completion, which ends at max_tokens only."""
    from vllm import TokensPrompt

    sampling = sampling_params(request, (), streams=False)
    sampling.ignore_eos = True
    prompt = TokensPrompt(prompt_token_ids=[*request.prompt])
    outputs = [output async for output in async_llm.generate(prompt, sampling, request.request_id)]
    return len(outputs[-1].outputs[0].token_ids)
