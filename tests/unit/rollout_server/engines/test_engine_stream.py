"""`Engine.stream`: what `generate` would say, piece by piece."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace

import pytest

from async_grpo.config.rollout import VllmConfig
from async_grpo.errors import EngineError
from async_grpo.weights.base import HeldWeights
from async_grpo.wire import VersionSpan
from rollout_server.engines.base import Generation, GenerationRequest, SpanLog
from rollout_server.engines.scripted import ScriptedEngine, hashed_script
from rollout_server.engines.vllm.engine import VllmEngine
from rollout_server.engines.vllm.requests import EngineRequest
from rollout_server.workflows.session import join
from tests.support.rollout_fakes import until

NOWHERE = Path("unused")


async def engine_of(tokens_per_s: float = 10_000.0) -> ScriptedEngine:
    engine = ScriptedEngine(hashed_script(8), tokens_per_s=tokens_per_s)
    await engine.start()
    return engine


def request(max_tokens: int = 100, *, interruptible: bool = False) -> GenerationRequest:
    return GenerationRequest("r", [1, 2], max_tokens, interruptible=interruptible)


async def read(engine: ScriptedEngine, asked: GenerationRequest) -> list[Generation]:
    return [piece async for piece in engine.stream(asked)]


@pytest.mark.parametrize("max_tokens", [3, 8, 100])
async def test_the_pieces_together_are_what_generate_returns(max_tokens: int) -> None:
    engine = await engine_of()
    first, *rest = await read(engine, request(max_tokens))
    whole = first
    for piece in rest:
        whole = join(whole, piece)
    generated = await engine.generate(request(max_tokens))
    assert whole.tokens.tolist() == generated.tokens.tolist()
    assert whole.logprobs.tolist() == generated.logprobs.tolist()
    assert (whole.spans, whole.finish_reason) == (generated.spans, generated.finish_reason)


async def test_streamed_tokens_are_counted_apart() -> None:
    engine = await engine_of()
    await read(engine, request())
    assert (engine.load().generated_tokens, engine.load().streamed_tokens) == (0, 8)
    await engine.generate(request())
    assert (engine.load().generated_tokens, engine.load().streamed_tokens) == (8, 8)


async def test_pieces_after_an_update_are_of_the_new_version() -> None:
    engine = await engine_of(tokens_per_s=200)
    reading = asyncio.create_task(read(engine, request()))
    await until(lambda: engine.load().streamed_tokens >= 3)
    await engine.update_weights(HeldWeights.in_store(NOWHERE, epoch=1, version=5), interruption="abort")
    pieces = await reading
    versions = [span.version for piece in pieces for span in piece.spans]
    assert sorted(set(versions)) == [-1, 5]
    assert versions == sorted(versions)
    assert len(versions) == 8
    assert pieces[-1].finish_reason == "stop"


async def test_a_reader_that_leaves_frees_the_engine() -> None:
    engine = await engine_of(tokens_per_s=50)
    async with aclosing(engine.stream(request())) as stream:
        await anext(stream)
        assert engine.load().running == 1
    assert engine.load().running == 0


async def test_an_engine_that_dies_fails_its_readers() -> None:
    engine = await engine_of(tokens_per_s=200)
    reading = asyncio.create_task(read(engine, request()))
    await until(lambda: engine.load().streamed_tokens >= 1)
    engine.fail()
    with pytest.raises(EngineError, match="died"):
        await reading


async def test_of_vllm_a_stream_on_its_way_out_is_not_made_again() -> None:
    engine = VllmEngine(NOWHERE, VllmConfig(), precision="float32")
    aborted: list[list[str]] = []

    async def abort(requests: list[str]) -> None:
        aborted.append(requests)

    processor = SimpleNamespace(request_states={})  # neither is known to vLLM's front end any more
    engine._llm = SimpleNamespace(output_processor=processor, abort=abort)
    read, unread = (EngineRequest(name, 1, interruptible=False, streams=True) for name in ("read#1", "unread#2"))
    read.passed_on = 5
    engine._active = {"read": read, "unread": unread}
    await engine._mark_active(2, "keep")
    assert (read.resubmit, unread.resubmit) == (False, True)
    assert read.spans.spans(7, since=5) == [VersionSpan(1, 0, 2)]
    assert aborted == [[]]


def test_spans_of_a_piece_count_from_its_start() -> None:
    log = SpanLog(1)
    log.update(4, 2)
    log.update(4, 3)
    log.update(9, 4)
    assert log.spans(12, since=2) == [VersionSpan(1, 0, 2), VersionSpan(3, 2, 7), VersionSpan(4, 7, 10)]
    assert log.spans(12, since=9) == [VersionSpan(4, 0, 3)]
    assert log.spans(5, since=5) == []
