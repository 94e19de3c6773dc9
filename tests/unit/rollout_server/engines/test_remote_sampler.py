"""Completions of a live rollout server over real HTTP: results, retries, failover and errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from async_grpo.data.base import make_task
from async_grpo.errors import EngineError, WaitTimeout
from async_grpo.utils.http_server import KEEP_ALIVE_S as SERVER_KEEP_ALIVE_S
from async_grpo.weights.manifest import WeightVersion
from async_grpo.wire import Task
from rollout_server.context import EvalContext
from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.http import KEEP_ALIVE_S, HttpSampler
from rollout_server.engines.scripted import ScriptedEngine
from rollout_server.evaluation.eval_runner import EvalPlan, EvalRunner
from rollout_server.http.server import ApiServer
from rollout_server.workflows import SingleTurn
from tests.support.http_fakes import Letters, http_config, ready_server, script_of, scripted
from tests.support.rollout_fakes import context_of

HELLO = [*b"hello", 255]


@asynccontextmanager
async def server(tmp_path: Path, engine: ScriptedEngine, *, version: int = 3, **http: Any) -> AsyncIterator[ApiServer]:
    async with ready_server(tmp_path, engine, http_config(http), weights=WeightVersion(2, version)) as (api, _, _):
        yield api


@asynccontextmanager
async def sampler(*addresses: str, max_concurrency: int = 8, **options: Any) -> AsyncIterator[HttpSampler]:
    sampler = HttpSampler(addresses, max_concurrency=max_concurrency, **{"timeout_s": 10.0, **options})
    yield sampler
    await sampler.aclose()


def request(**changes: Any) -> GenerationRequest:
    return GenerationRequest(**{"request_id": "r", "prompt": [1, 2], "max_tokens": 20, "seed": 2**62, **changes})


async def test_the_server_gets_the_same_request_as_a_local_engine(tmp_path: Path) -> None:
    received: list[GenerationRequest] = []

    def script(request: GenerationRequest) -> list[int]:
        received.append(request)
        return HELLO

    async with server(tmp_path, await scripted(script)) as api, sampler(api.address) as live:
        await live.generate(request(temperature=0.5, prefix=[7]))
    (engine_request,) = received
    assert list(engine_request.prompt) == [1, 2, 7]
    assert (engine_request.temperature, engine_request.seed, engine_request.max_tokens) == (0.5, 2**62, 20)


async def test_an_evaluation_over_http_equals_one_with_the_engine(tmp_path: Path) -> None:
    class Source:
        dropped: dict[str, int] = {}

        def task(self, index: int) -> Task:
            return make_task(index, "p", [1], "hello")

        def held_out(self) -> list[Task]:
            return [make_task(index, f"p{index}", [4, index], "hello" if index % 2 else "no") for index in range(6)]

    engine = await scripted(lambda request: [*str(request.seed)[-1:].encode(), 255] if request.temperature else HELLO)
    config, plan = http_config(), EvalPlan(prompts=6, samples=3)
    pool = context_of(tmp_path, config, engine).pool

    async def evaluate(policy: Any) -> Any:
        context = EvalContext(config, "eval", policy, pool, SingleTurn(Letters()), Source())
        evaluation = await EvalRunner(context).grade_prompts(plan)
        return [[answer.sample.text for answer in prompt.sampled] for prompt in evaluation.prompts], evaluation.metrics

    async with server(tmp_path, engine) as api, sampler(api.address, max_concurrency=2) as live:
        assert await evaluate(live) == await evaluate(engine)


async def test_a_busy_server_is_retried(tmp_path: Path) -> None:
    engine = await scripted(script_of("hello" * 5), tokens_per_s=100.0)
    async with server(tmp_path, engine, max_concurrency=1) as api, sampler(api.address, max_concurrency=3) as live:
        calls = [live.generate(request(request_id=f"r{number}")) for number in range(3)]
        assert len(await asyncio.gather(*calls)) == 3


async def test_requests_are_spread_over_servers_and_a_lost_server_is_not_used_again(tmp_path: Path) -> None:
    engines = [await scripted(script_of("hello")) for _ in range(2)]
    async with (
        server(tmp_path, engines[0]) as first,
        server(tmp_path, engines[1], version=4) as second,
        sampler(first.address, second.address) as live,
    ):
        generations = await asyncio.gather(*(live.generate(request(request_id=f"r{n}")) for n in range(6)))
        assert {span.version for generation in generations for span in generation.spans} == {3, 4}
        await first.detach()
        await first.aclose()
        assert (await live.generate(request())).spans[0].version == 4
        assert live.addresses == [second.address]


async def test_a_run_without_servers_raises_an_error(tmp_path: Path) -> None:
    async with server(tmp_path, await scripted(script_of("hello"))) as api:
        address = api.address
    async with sampler(address) as live:
        with pytest.raises(EngineError, match="no rollout server"):
            await live.generate(request())


async def test_a_refusal_is_reported_with_its_message(tmp_path: Path) -> None:
    async with server(tmp_path, await scripted(script_of("hello"))) as api, sampler(api.address) as live:
        with pytest.raises(EngineError, match=r"status 400.*max_model_len"):
            await live.generate(request(max_tokens=1000))


async def test_idle_connections_are_closed_before_the_server_closes_them(tmp_path: Path) -> None:
    assert KEEP_ALIVE_S < SERVER_KEEP_ALIVE_S
    async with server(tmp_path, await scripted(script_of("hello"))) as api, sampler(api.address) as live:
        await live.generate(request())
        assert live._session is not None and live._session.connector is not None
        assert live._session.connector._keepalive_timeout == KEEP_ALIVE_S


async def test_the_key_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNC_GRPO_HTTP_KEY", "open sesame")
    async with server(tmp_path, await scripted(script_of("hello"))) as api:
        async with sampler(api.address, key="open sesame") as live:
            assert (await live.generate(request())).tokens.tolist() == HELLO
        async with sampler(api.address) as stranger:
            with pytest.raises(EngineError, match="status 401"):
                await stranger.generate(request())


async def test_a_server_that_stays_busy_times_out_by_name(tmp_path: Path) -> None:
    async with server(tmp_path, await scripted(script_of("hello"))) as api:
        await api.detach()
        async with sampler(api.address, timeout_s=0.2) as live:
            with pytest.raises(WaitTimeout, match=api.address):
                await live.generate(request())
