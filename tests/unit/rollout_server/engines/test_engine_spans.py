"""Version spans, as vLLM reports them and as they are kept here; how the scripted engine ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from async_grpo.config.rollout import RolloutConfig
from async_grpo.wire import VersionSpan
from rollout_server.engines.base import GenerationRequest, SpanLog, from_labels
from rollout_server.engines.scripted import ScriptedEngine, hashed_script
from rollout_server.engines.vllm.engine import VllmEngine
from rollout_server.engines.vllm.requests import EngineRequest


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


def test_spans_of_a_piece_count_from_its_start() -> None:
    log = SpanLog(1)
    log.update(4, 2)
    log.update(4, 3)
    log.update(9, 4)
    assert log.spans(12, since=2) == [VersionSpan(1, 0, 2), VersionSpan(3, 2, 7), VersionSpan(4, 7, 10)]
    assert log.spans(12, since=9) == [VersionSpan(4, 0, 3)]
    assert log.spans(5, since=5) == []


async def test_of_vllm_a_stream_on_its_way_out_is_not_made_again() -> None:
    engine = VllmEngine(Path("unused"), RolloutConfig(), precision="float32")
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


async def test_the_scripted_engine_says_why_it_ended_and_repeats_itself() -> None:
    engine = ScriptedEngine(hashed_script(10))
    await engine.start()
    whole = await engine.generate(GenerationRequest("a", [1, 2], 100, seed=4))
    again = await engine.generate(GenerationRequest("a", [1, 2], 3, seed=4))
    assert (len(whole.tokens), whole.finish_reason, again.finish_reason) == (10, "stop", "length")
    assert again.tokens.tolist() == whole.tokens[:3].tolist()
    assert [piece.finish_reason async for piece in engine.stream(GenerationRequest("b", [1, 2], 100))][-2:] == [
        "",
        "stop",
    ]


async def test_the_scripted_engine_gives_the_same_tokens_in_pieces() -> None:
    made = []
    for at_once in (1, 3):
        engine = ScriptedEngine(hashed_script(8), tokens_per_s=10_000, at_once=at_once)
        await engine.start()
        pieces = [len(piece.tokens) async for piece in engine.stream(GenerationRequest("a", [1], max_tokens=7, seed=2))]
        assert pieces == ([1] * 7 if at_once == 1 else [3, 3, 1]) + [0]
        made.append((await engine.generate(GenerationRequest("b", [1], max_tokens=7, seed=2))).tokens.tolist())
        load = engine.load()
        assert (load.generated_tokens, load.streamed_tokens) == (7, 7)
    assert made[0] == made[1]
