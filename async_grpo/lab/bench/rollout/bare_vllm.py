"""Bare vLLM, fed by plain loops without a server: the baseline for a rollout server.

    generate_continuously   `concurrency` loops, each with one request after the other
    generate_in_waves       `concurrency` requests together; the next ones start when all of them have ended

Both wait only for vLLM, and sample as `VllmEngine` does, log-probabilities included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.vllm.requests import make_sampling_params

Loop = Callable[[Any, Sequence[GenerationRequest], int], Awaitable[list[int]]]
"""`generate_continuously` or `generate_in_waves`."""


async def generate_continuously(async_llm: Any, requests: Sequence[GenerationRequest], concurrency: int) -> list[int]:
    """Return the number of tokens of every completion, in the order of the requests. Requests start in that order."""
    token_counts = [0] * len(requests)
    remaining = iter(enumerate(requests))

    async def generate_next() -> None:
        for index, request in remaining:  # shared by all loops
            token_counts[index] = await complete(async_llm, request)

    async with asyncio.TaskGroup() as loops:
        for _ in range(concurrency):
            loops.create_task(generate_next())
    return token_counts


async def generate_in_waves(async_llm: Any, requests: Sequence[GenerationRequest], concurrency: int) -> list[int]:
    """Return the number of tokens of every completion, in the order of the requests."""
    token_counts: list[int] = []
    for start in range(0, len(requests), concurrency):
        wave = requests[start : start + concurrency]
        token_counts += await asyncio.gather(*(complete(async_llm, request) for request in wave))
    return token_counts


async def complete(async_llm: Any, request: GenerationRequest) -> int:
    """Sample one completion of exactly `max_tokens` tokens. Returns the number of tokens."""
    sampling_params = make_sampling_params(request, (), is_stream=False)
    sampling_params.ignore_eos = True
    prompt = {"prompt_token_ids": [*request.prompt]}  # vLLM's TokensPrompt
    outputs = [output async for output in async_llm.generate(prompt, sampling_params, request.request_id)]
    return len(outputs[-1].outputs[0].token_ids)
