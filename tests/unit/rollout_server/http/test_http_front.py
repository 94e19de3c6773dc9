"""The real socket and OpenAI's own client, around a scripted engine."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from async_grpo.errors import ConfigError
from async_grpo.utils.http_server import address_of
from async_grpo.weights.base import HeldWeights
from rollout_server.http.server import ApiServer, bind
from tests.support.http_fakes import http_config, ready_server, script_of, scripted
from tests.support.rollout_fakes import buffer_of
from tests.support.waiting import until


def client_of(api: ApiServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{api.address}/v1", api_key="none", max_retries=0, timeout=10)


async def test_the_openai_client_completes_and_chats(tmp_path: Path) -> None:
    async with ready_server(tmp_path, await scripted(script_of("hello"))) as (api, _, _), client_of(api) as client:
        assert [model.id async for model in client.models.list()] == ["test"]
        completion = await client.completions.create(model="test", prompt="hi", n=2, logprobs=0, seed=1, stop=["z"])
        assert [choice.text for choice in completion.choices] == ["hello", "hello"]
        assert completion.system_fingerprint == "1-0"
        assert completion.usage is not None and completion.usage.completion_tokens == 12
        raw = await client.chat.completions.with_raw_response.create(
            model="test", messages=[{"role": "user", "content": "hi"}], logprobs=True, temperature=0
        )
        assert raw.headers["x-policy-version"] == "1-0"
        assert raw.parse().choices[0].message.content == "hello"


async def test_the_openai_client_streams(tmp_path: Path) -> None:
    async with ready_server(tmp_path, await scripted(script_of("hello"))) as (api, _, _), client_of(api) as client:
        pieces = [piece async for piece in await client.completions.create(model="test", prompt="hi", stream=True, n=2)]
        texts = ["".join(p.choices[0].text for p in pieces if p.choices[0].index == index) for index in (0, 1)]
        assert texts == ["hello", "hello"]
        assert len(pieces) > 4
        assert sum(piece.choices[0].finish_reason == "stop" for piece in pieces) == 2
        stream = await client.chat.completions.create(
            model="test",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        *chunks, last = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello"
        assert last.usage is not None and last.usage.completion_tokens == 6


async def test_the_openai_client_understands_refusals(tmp_path: Path) -> None:
    async with ready_server(tmp_path, await scripted(script_of("hello"))) as (api, _, _), client_of(api) as client:
        with pytest.raises(openai.BadRequestError, match="top_p"):
            await client.completions.create(model="test", prompt="hi", top_p=0.5)
        with pytest.raises(openai.NotFoundError, match="'test'"):
            await client.completions.create(model="other", prompt="hi")


async def test_fingerprints_in_a_stream_follow_policy_updates(tmp_path: Path) -> None:
    engine = await scripted(script_of("a" * 40), tokens_per_s=200)
    async with ready_server(tmp_path, engine) as (api, _, _), client_of(api) as client:
        stream = await client.completions.create(model="test", prompt="hi", max_tokens=40, stream=True)
        seen = [(await anext(stream)).system_fingerprint]
        await engine.update_weights(HeldWeights.in_store(tmp_path, epoch=1, version=1), interruption="keep")
        seen += [piece.system_fingerprint async for piece in stream]
        assert (seen[0], seen[-1]) == ("1-0", "1-1")
        assert seen == sorted(seen)


async def test_an_engine_that_dies_ends_a_stream_with_an_error(tmp_path: Path) -> None:
    engine = await scripted(script_of("a" * 40), tokens_per_s=100)
    async with ready_server(tmp_path, engine) as (api, _, _), client_of(api) as client:
        stream = await client.completions.create(model="test", prompt="hi", max_tokens=40, stream=True)
        await anext(stream)
        engine.fail()
        with pytest.raises(openai.APIError, match="engine failed"):
            _ = [piece async for piece in stream]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnected_client_frees_the_engine(tmp_path: Path, stream: bool) -> None:
    engine = await scripted(script_of("a" * 50), tokens_per_s=2)
    async with ready_server(tmp_path, engine) as (api, _, _):
        async with httpx.AsyncClient(base_url=api.address, timeout=10) as client:
            body = {"prompt": "hi", "max_tokens": 50, "stream": stream}
            posting = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(lambda: engine.load().running == 1)
            posting.cancel()
            await asyncio.gather(posting, return_exceptions=True)
        await until(lambda: engine.load().running == 0)
        metrics = await _metrics(api)
        assert "async_grpo_http_completions_running 0.0" in metrics


async def test_a_client_that_does_not_read_delays_no_update(tmp_path: Path) -> None:
    engine = await scripted(script_of("a" * 40))
    async with ready_server(tmp_path, engine) as (api, _, _), httpx.AsyncClient(base_url=api.address) as client:
        body = {"prompt": "hi", "max_tokens": 40, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body):
            async with asyncio.timeout(5):
                await engine.update_weights(HeldWeights.in_store(tmp_path, epoch=1, version=1), interruption="drain")
        assert engine.version == 1


async def test_tokens_for_http_are_not_counted_as_tokens_of_the_run(tmp_path: Path) -> None:
    engine = await scripted(script_of("yes"))
    changes: dict[str, Any] = {"steps": 1, "eval": {"prompts": 1, "greedy": False, "samples": 1}}
    buffer = buffer_of(http_config(**changes))
    async with ready_server(tmp_path, engine, http_config(**changes), buffer=buffer) as (api, server, receiver):
        serve = asyncio.create_task(server.serve())
        async with client_of(api) as client:
            for _ in range(5):
                await client.completions.create(model="test", prompt="hi")
        batch = await buffer.take_batch(epoch=0, version=0, timeout_s=5)
        await receiver.publish(1, 1)
        await buffer.publish_version(epoch=0, version=1)
        await buffer.release_batch(batch)
        await buffer.end_run()
        async with asyncio.timeout(10):
            await serve
        board = server._context.board
        assert (await board.counters())["generated_tokens"] == (await buffer.stats()).inserted * 4 * 4
        assert engine.load().streamed_tokens == 5 * 4


async def test_the_board_has_the_http_address_of_a_server(tmp_path: Path) -> None:
    async with ready_server(tmp_path, await scripted(script_of("yes"))) as (api, server, _):
        await server._heartbeat.send_heartbeat()
        (beat,) = await server._context.board.live_servers()
        assert beat.http == api.address
        async with httpx.AsyncClient(base_url=beat.http) as client:
            assert (await client.get("/readyz")).status_code == 200


async def test_a_server_drained_over_http_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNC_GRPO_ADMIN_TOKEN", "token")
    engine = await scripted(script_of("yes"), tokens_per_s=100)
    async with ready_server(tmp_path, engine) as (api, server, _), client_of(api) as client:
        serve = asyncio.create_task(server.serve())
        posting = asyncio.create_task(client.completions.create(model="test", prompt="hi"))
        await until(lambda: engine.load().streamed_tokens > 0)
        async with httpx.AsyncClient(base_url=api.address, headers={"authorization": "Bearer token"}) as admin:
            assert (await admin.post("/admin/drain")).status_code == 202
        async with asyncio.timeout(10):
            await serve
        assert (await posting).choices[0].text == "yes"


async def test_an_urgent_drain_waits_for_no_client(tmp_path: Path) -> None:
    engine = await scripted(script_of("a" * 50), tokens_per_s=2)
    async with ready_server(tmp_path, engine) as (api, server, _), client_of(api) as client:
        posting = asyncio.create_task(client.completions.create(model="test", prompt="hi", max_tokens=50))
        await until(lambda: engine.load().streamed_tokens > 0)
        server._dispatcher.admission.drain(now=True)
        async with asyncio.timeout(10):
            await server.serve()
        with pytest.raises(openai.InternalServerError, match="stopping"):
            await posting


async def test_servers_with_one_port_use_the_next_free_ones() -> None:
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
        with bind("127.0.0.1", port) as second:
            assert port < second.getsockname()[1] < port + 64


def test_a_host_of_another_machine_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        bind("192.0.2.1", 0)


def test_addresses_are_usable_from_other_machines() -> None:
    assert address_of("127.0.0.1", 80) == "http://127.0.0.1:80"
    assert address_of("::1", 80) == "http://[::1]:80"
    assert address_of("0.0.0.0", 80) == f"http://{socket.gethostname()}:80"


async def _metrics(api: ApiServer) -> list[str]:
    async with httpx.AsyncClient(base_url=api.address) as client:
        return (await client.get("/metrics")).text.splitlines()
