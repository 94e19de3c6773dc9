"""OpenAI's client against a real vLLM with weight updates: every log-probability is of the version reported with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, cast

import numpy as np
import openai
import pytest
import pytest_asyncio

from async_grpo.wire import VersionSpan
from rollout_server.engines.base import Generation, GenerationRequest
from rollout_server.engines.http import HttpSampler
from rollout_server.workflows.session import join_generations
from tests.support.http_fakes import serving
from tests.support.vllm_lab import EXACT, FAR, VOCABULARY, Lab, prompt_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

FIRST = 0x100


class OneCharacterEach:
    """A tokenizer with one character per token, so that the text determines the tokens."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) - FIRST for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(FIRST + token) for token in token_ids)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(untied_lab: Lab) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(untied_lab.engine, OneCharacterEach(), vocabulary=VOCABULARY) as address,
        openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_completions_carry_the_version_that_sampled_them(untied_lab: Lab, client: openai.AsyncOpenAI) -> None:
    for index in range(2):
        version = await untied_lab.update("keep")
        prompt = prompt_of(10, index)
        answer = await client.completions.create(
            model="policy", prompt=[prompt], max_tokens=30, logprobs=0, n=2, seed=index, temperature=0.7
        )
        assert answer.system_fingerprint == f"0-{version}"
        assert answer.choices[0].text != answer.choices[1].text
        for choice in answer.choices:
            generation = generation_of(choice)
            assert generation.spans == [VersionSpan(version, 0, 30)]
            assert untied_lab.error(prompt, generation, temperature=0.7) < EXACT


async def test_a_seed_reproduces_a_completion(client: openai.AsyncOpenAI) -> None:
    texts = [
        (await client.completions.create(model="policy", prompt="Āā", max_tokens=20, seed=5)).choices[0].text
        for _ in range(2)
    ]
    assert texts[0] == texts[1]


async def test_the_http_sampler_returns_the_engines_completion(untied_lab: Lab, client: openai.AsyncOpenAI) -> None:
    afar = HttpSampler([str(client.base_url).removesuffix("/v1/")], max_concurrency=8, timeout_s=60.0)
    request = GenerationRequest("afar", prompt_of(10, 1), 40, seed=2**62 + 1)
    here, there = await untied_lab.engine.generate(request), await afar.generate(request)
    assert there.tokens.tolist() == here.tokens.tolist()
    assert (there.spans, there.finish_reason) == (here.spans, here.finish_reason)
    assert np.allclose(there.logprobs, here.logprobs, atol=EXACT)
    pieces = [piece async for piece in afar.stream(request)]
    assert [token for piece in pieces for token in piece.tokens.tolist()] == here.tokens.tolist()
    await afar.aclose()


async def test_stream_parts_carry_the_version_that_sampled_them(untied_lab: Lab, client: openai.AsyncOpenAI) -> None:
    prompt = prompt_of(6, 3)
    stream = await client.completions.create(
        model="policy", prompt=cast(Any, prompt), max_tokens=900, logprobs=0, stream=True
    )
    pieces = [await anext(stream)]
    for updates in range(2):
        while len(fingerprints(pieces)) <= updates:
            pieces.append(await anext(stream))
        version = await untied_lab.update("keep")
    pieces += [piece async for piece in stream]
    assert len(pieces) > 10
    assert fingerprints(pieces) == [f"0-{old}" for old in range(version - 2, version + 1)]
    whole = generation_of(pieces[0].choices[0])
    for piece in pieces[1:]:
        whole = join_generations(whole, generation_of(piece.choices[0]))
    assert (len(whole.tokens), len(whole.spans)) == (900, 3)
    assert untied_lab.error(prompt, whole) < EXACT
    assert untied_lab.error(prompt, whole, keep=False) > FAR


async def test_streams_that_start_around_updates_are_exact(untied_lab: Lab) -> None:
    """Those without a token are made again under the new weights, and nothing comes twice."""
    prompt = prompt_of(150, 4)
    reading = []
    for turn in range(3):
        reading += [asyncio.create_task(read(untied_lab, f"s{turn}-{index}", prompt)) for index in range(6)]
        await asyncio.sleep(0.01)
        await untied_lab.update("keep")
    for generation in await asyncio.gather(*reading):
        assert len(generation.tokens) == 30
        assert untied_lab.error(prompt, generation) < EXACT


async def read(untied_lab: Lab, name: str, prompt: list[int], max_tokens: int = 30) -> Generation:
    """Read a stream and join its pieces."""
    request = GenerationRequest(name, prompt, max_tokens, interruptible=False)
    async with aclosing(untied_lab.engine.stream(request)) as stream:
        whole = await anext(stream)
        async for piece in stream:
            whole = join_generations(whole, piece)
    return whole


def generation_of(choice: Any) -> Generation:
    """Convert a choice of a response, or a piece of one."""
    tokens = np.array([ord(character) - FIRST for character in choice.text], np.int32)
    logprobs = np.array(choice.logprobs.token_logprobs, np.float32)
    spans = [VersionSpan(*span) for span in choice.policy_versions]
    return Generation(tokens, logprobs, spans, choice.finish_reason or "")


def fingerprints(pieces: Sequence[Any]) -> list[str]:
    """Distinct fingerprints in order of arrival."""
    return list(dict.fromkeys(piece.system_fingerprint for piece in pieces))
