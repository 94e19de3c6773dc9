"""Version spans, and the scripted engine that keeps them as the real one does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from async_grpo.errors import EngineError, WeightsError
from async_grpo.weights.base import HeldWeights
from async_grpo.wire import VersionSpan
from rollout_server.engines.base import Engine, GenerationRequest, SpanLog, from_labels
from rollout_server.engines.scripted import ScriptedEngine, hashed_script, scripted_logprobs

NO_STORE = Path("/dev/shm/no-such-store")


def request(name: str = "a", max_tokens: int = 100, **fields: object) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt=[1, 2], max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("updates", "tokens", "expected"),
    [
        ([], 5, [(3, 0, 5)]),
        ([(2, 4)], 5, [(3, 0, 2), (4, 2, 5)]),
        ([(0, 4)], 5, [(4, 0, 5)]),
        ([(5, 4)], 5, [(3, 0, 5)]),
        ([(2, 4), (2, 5)], 5, [(3, 0, 2), (5, 2, 5)]),
        ([(1, 4), (3, 6)], 5, [(3, 0, 1), (4, 1, 3), (6, 3, 5)]),
        ([(0, 4)], 0, []),
    ],
)
def test_spans_cover_the_tokens_in_order(
    updates: list[tuple[int, int]], tokens: int, expected: list[tuple[int, int, int]]
) -> None:
    log = SpanLog(3)
    for have, version in updates:
        log.update(have, version)
    assert log.spans(tokens) == [VersionSpan(*span) for span in expected]


def test_labels_of_vllm_become_versions_and_its_default_label_is_the_checkpoint() -> None:
    labels = [SimpleNamespace(version="default", start=0, end=2), SimpleNamespace(version="12", start=2, end=5)]
    assert from_labels(labels) == [VersionSpan(-1, 0, 2), VersionSpan(12, 2, 5)]


async def test_the_scripted_engine_repeats_itself_and_continues_a_prefix() -> None:
    engine: Engine = ScriptedEngine(hashed_script(10))
    await engine.start()
    whole = await engine.generate(request(seed=4))
    rest = await engine.generate(request(seed=4, prefix=whole.tokens[:6].tolist()))
    assert whole.finish_reason == "stop"
    assert rest.tokens.tolist() == whole.tokens[6:].tolist()
    assert np.array_equal(whole.logprobs, scripted_logprobs(whole.tokens.tolist()))
    assert (await engine.generate(request(max_tokens=3))).finish_reason == "length"


async def test_a_request_in_flight_goes_on_under_the_new_version() -> None:
    engine = ScriptedEngine(hashed_script(20), tokens_per_s=200)
    await engine.start()
    await engine.update_weights(HeldWeights.in_store(NO_STORE, epoch=0, version=0), interruption="keep")
    running = asyncio.create_task(engine.generate(request()))
    while engine.load().generated_tokens < 5:
        await asyncio.sleep(0.005)
    await engine.update_weights(HeldWeights.in_store(NO_STORE, epoch=0, version=1), interruption="keep")
    spans = (await running).spans
    assert [span.version for span in spans] == [0, 1]
    assert spans[0].end >= 5
    assert engine.updates == [((0, 0), "keep"), ((0, 1), "keep")]


async def test_a_dead_scripted_engine_fails_its_requests_and_a_missing_store_its_update() -> None:
    engine = ScriptedEngine(hashed_script(1000), reads_store=True)
    await engine.start()
    with pytest.raises(WeightsError, match="no weight store"):
        await engine.update_weights(HeldWeights.in_store(NO_STORE, epoch=0, version=0), interruption="keep")
    running = asyncio.create_task(engine.generate(request(max_tokens=1000)))
    await asyncio.sleep(0.02)
    engine.fail()
    with pytest.raises(EngineError, match="died"):
        await running
    assert engine.load().running == 0
