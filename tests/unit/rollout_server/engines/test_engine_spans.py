"""Version spans, reported by vLLM or derived here, and the completions of the scripted engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from async_grpo.config.rollout import RolloutConfig
from async_grpo.wire import VersionSpan
from rollout_server.engines.base import Generation, GenerationRequest, SpanLog, spans_from_labels
from rollout_server.engines.scripted import ScriptedEngine, hashed_script
from rollout_server.engines.vllm.engine import VllmEngine
from rollout_server.engines.vllm.requests import EngineRequest, read_partial, take_next_piece


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
    for token_count, version in updates:
        log.record_update(token_count, version)
    assert log.spans(tokens) == [VersionSpan(*span) for span in expected]


def test_vllm_labels_become_versions_and_the_default_label_means_the_checkpoint() -> None:
    labels = [SimpleNamespace(version="default", start=0, end=2), SimpleNamespace(version="12", start=2, end=5)]
    assert spans_from_labels(labels) == [VersionSpan(-1, 0, 2), VersionSpan(12, 2, 5)]


def test_spans_of_a_stream_piece_count_from_its_start() -> None:
    log = SpanLog(1)
    log.record_update(4, 2)
    log.record_update(4, 3)
    log.record_update(9, 4)
    assert log.spans(12, since=2) == [VersionSpan(1, 0, 2), VersionSpan(3, 2, 7), VersionSpan(4, 7, 10)]
    assert log.spans(12, since=9) == [VersionSpan(4, 0, 3)]
    assert log.spans(5, since=5) == []


async def test_streams_and_partial_completions_use_vllms_labels() -> None:
    request = EngineRequest("a#1", 1, interruptible=True, is_stream=True)
    request.span_log.record_update(5, 2)  # derived from a front end that was behind
    logprobs = SimpleNamespace(logprobs=SimpleNamespace(logprobs=[-1.0] * 8))
    state = SimpleNamespace(
        request_id="a#1",
        detokenizer=SimpleNamespace(output_token_ids=[7] * 8),
        logprobs_processor=logprobs,
        weight_version_starts=[("1", 0), ("2", 6)],
    )
    llm = SimpleNamespace(output_processor=SimpleNamespace(request_states={"a#1": state}))
    partial = read_partial(llm, request)
    assert partial is not None
    assert partial.spans == [VersionSpan(1, 0, 6), VersionSpan(2, 6, 8)]
    assert take_next_piece(llm, piece_of(4), request).spans == [VersionSpan(1, 0, 4)]
    llm.output_processor.request_states.clear()  # it has finished
    assert take_next_piece(llm, piece_of(4), request).spans == [VersionSpan(1, 0, 2), VersionSpan(2, 2, 4)]


async def test_vllm_releases_without_labels_use_derived_spans() -> None:
    request = EngineRequest("a#1", 1, interruptible=True, is_stream=True)
    request.span_log.record_update(3, 2)
    llm = SimpleNamespace(output_processor=SimpleNamespace(request_states={}))
    assert take_next_piece(llm, piece_of(4), request).spans == [VersionSpan(1, 0, 3), VersionSpan(2, 3, 4)]


async def test_disputed_spans_are_counted_and_the_first_is_logged() -> None:
    engine = VllmEngine(Path("unused"), RolloutConfig(), precision="float32")
    request = EngineRequest("a#1", 1, interruptible=True)
    labelled = Generation(np.zeros(3, np.int32), np.zeros(3, np.float32), [VersionSpan(2, 0, 3)], "length")
    with capture_logs() as lines:
        engine._compare_spans(labelled, request)
        engine._compare_spans(labelled, request)
        request.span_log.record_update(0, 2)
        engine._compare_spans(labelled, request)
    assert [(line["log_level"], line["request"]) for line in lines] == [("warning", "a#1")]
    assert engine.load().disputed_spans == 2


def piece_of(tokens: int) -> Any:
    """A vLLM output with `tokens` tokens of an unfinished request."""
    logprobs = SimpleNamespace(logprobs=[-1.0] * tokens)
    completion = SimpleNamespace(token_ids=[7] * tokens, logprobs=logprobs, finish_reason=None, weight_versions=None)
    return SimpleNamespace(outputs=[completion])


async def test_a_finishing_stream_is_not_resubmitted() -> None:
    engine = VllmEngine(Path("unused"), RolloutConfig(), precision="float32")
    aborted: list[list[str]] = []

    async def abort(requests: list[str]) -> None:
        aborted.append(requests)

    processor = SimpleNamespace(request_states={})  # neither is known to vLLM's front end any more
    engine._llm = SimpleNamespace(output_processor=processor, abort=abort)
    read, unread = (EngineRequest(name, 1, interruptible=False, is_stream=True) for name in ("read#1", "unread#2"))
    read.yielded_tokens = 5
    engine._in_flight = {"read": read, "unread": unread}
    await engine._apply_interruption(2, "keep")
    assert (read.must_resubmit, unread.must_resubmit) == (False, True)
    assert read.span_log.spans(7, since=5) == [VersionSpan(1, 0, 2)]
    assert aborted == [[]]


async def test_the_scripted_engine_is_deterministic_and_reports_finish_reasons() -> None:
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


async def test_the_scripted_engine_streams_the_same_tokens_in_chunks() -> None:
    completions = []
    for chunk_tokens, expected_sizes in ((1, [1] * 7 + [0]), (3, [3, 3, 1, 0])):
        engine = ScriptedEngine(hashed_script(8), tokens_per_s=10_000, chunk_tokens=chunk_tokens)
        await engine.start()
        sizes = [len(piece.tokens) async for piece in engine.stream(GenerationRequest("a", [1], max_tokens=7, seed=2))]
        assert sizes == expected_sizes
        generation = await engine.generate(GenerationRequest("b", [1], max_tokens=7, seed=2))
        completions.append(generation.tokens.tolist())
        load = engine.load()
        assert (load.generated_tokens, load.streamed_tokens) == (7, 7)
    assert completions[0] == completions[1]
