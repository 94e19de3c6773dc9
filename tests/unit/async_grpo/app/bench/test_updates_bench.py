"""The bench of weight updates judges requests, and does not hang on an engine that died."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from async_grpo.app.bench.rollout import updates
from async_grpo.app.bench.rollout.updates import UpdateBench, UpdateTotals, _traffic
from async_grpo.errors import EngineError
from async_grpo.wire import VersionSpan
from rollout_server.engines.base import Generation, GenerationRequest
from rollout_server.engines.scripted import ScriptedEngine, hashed_script

BENCH = UpdateBench(concurrency=4, max_tokens=(5, 10))


def judged(spans: list[tuple[int, int, int]], *, tokens: int = 10, finish_reason: str = "length") -> UpdateTotals:
    totals = UpdateTotals()
    arrays = np.zeros(tokens, np.int32), np.zeros(tokens, np.float32)
    generation = Generation(*arrays, [VersionSpan(*span) for span in spans], finish_reason)
    totals.add(GenerationRequest("r", [1], max_tokens=10), generation)
    return totals


def test_a_whole_request_is_counted_and_nothing_is_held_against_it() -> None:
    assert judged([(3, 0, 10)]) == UpdateTotals(requests=1)
    assert judged([(3, 0, 4), (5, 4, 10)]) == UpdateTotals(requests=1, across_updates=1)


@pytest.mark.parametrize(("tokens", "finish_reason"), [(9, "length"), (10, "abort")])
def test_a_request_that_ended_early_is_cut(tokens: int, finish_reason: str) -> None:
    assert judged([(3, 0, tokens)], tokens=tokens, finish_reason=finish_reason).cut == 1


@pytest.mark.parametrize(
    "spans", [[], [(3, 0, 9)], [(3, 1, 10)], [(3, 0, 4), (5, 5, 10)], [(5, 0, 4), (3, 4, 10)], [(3, 0, 4), (3, 4, 10)]]
)
def test_spans_with_gaps_or_out_of_order_are_inexact(spans: list[tuple[int, int, int]]) -> None:
    assert judged(spans).wrong_spans == 1


async def test_streams_go_on_until_the_block_ends_and_then_finish_what_they_have() -> None:
    engine, totals = ScriptedEngine(hashed_script(20)), UpdateTotals()
    await engine.start()
    async with _traffic(BENCH, engine, totals):
        while totals.requests < 10:
            await asyncio.sleep(0.005)
    assert engine.load().running == totals.cut == totals.wrong_spans == 0


async def test_an_engine_that_dies_ends_the_bench() -> None:
    engine = ScriptedEngine(hashed_script(20))
    await engine.start()
    with pytest.raises(ExceptionGroup) as caught:
        async with _traffic(BENCH, engine, UpdateTotals()):
            engine.fail()
            await asyncio.sleep(60)
    assert all(isinstance(error, EngineError) for error in caught.value.exceptions)


async def test_requests_that_never_end_are_reported_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "_END_TIMEOUT_S", 0.05)
    engine = ScriptedEngine(hashed_script(20), tokens_per_s=0.01)
    await engine.start()
    with pytest.raises(ExceptionGroup, match="TaskGroup") as caught:
        async with _traffic(BENCH, engine, UpdateTotals()):
            await asyncio.sleep(0)
    assert "4 requests were lost" in str(caught.value.exceptions[0])
