"""A sample is written turn by turn, can be saved at any moment, and resumes where it was."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from async_grpo.weights.base import HeldWeights
from async_grpo.wire import Sample, Turn, VersionSpan
from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.scripted import ScriptedEngine
from rollout_server.workflows.session import SampleSession

PROMPT, STOP = [9], 99


def script(request: GenerationRequest) -> list[int]:
    """Turns of 3, then 2 tokens, distinguished by the observation between them; prefix included."""
    answered = 50 in request.prefix
    return [*request.prefix[:4], 4, STOP] if answered else [1, 2, STOP]


class Tool:
    """Answers 50 and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self) -> Sequence[int]:
        self.calls += 1
        return [50]


async def engine_at(version: int, *, tokens_per_s: float = 10_000.0) -> ScriptedEngine:
    engine = ScriptedEngine(script, tokens_per_s=tokens_per_s)
    await engine.start()
    await update(engine, version)
    return engine


async def update(engine: ScriptedEngine, version: int, how: str = "keep") -> None:
    await engine.update_weights(HeldWeights.in_store(Path(), epoch=1, version=version), interruption=how)  # type: ignore[arg-type]


def session_on(engine: ScriptedEngine, prior: Sample | None = None, *, max_tokens: int = 20) -> SampleSession:
    return SampleSession(engine, "s", PROMPT, seed=1, temperature=1.0, max_tokens=max_tokens, prior=prior)


async def converse(session: SampleSession, tool: Tool) -> Sample:
    first = await session.turn()
    if first.finish_reason == "stop":
        await session.observe(tool)
        if session.tokens_left:
            await session.turn()
    return session.sample("text")


async def test_an_observation_before_the_first_turn_is_refused() -> None:
    session, tool = session_on(await engine_at(0)), Tool()
    with pytest.raises(RuntimeError, match=r"turn\(\)"):
        await session.observe(tool)
    assert tool.calls == 0


async def test_turns_of_the_policy_and_answers_of_tools_are_recorded_apart() -> None:
    sample = await converse(session_on(await engine_at(3)), Tool())
    sample.validate()
    assert sample.token_ids().tolist() == [1, 2, STOP, 50, 4, STOP]
    assert sample.written_by_policy().tolist() == [True, True, True, False, True, True]
    assert sample.token_logprobs()[3] == 0
    assert (sample.spans, sample.finish_reason) == ([VersionSpan(3, 0, 6)], "stop")


async def test_a_completion_never_exceeds_max_tokens() -> None:
    for max_tokens, turns in [(3, [True, False]), (4, [True, False]), (5, [True, False, True])]:
        sample = await converse(session_on(await engine_at(0), max_tokens=max_tokens), Tool())
        assert (sample.length, sample.finish_reason) == (max_tokens, "length")
        assert [turn.by_policy for turn in sample.turns] == turns


async def test_a_tool_whose_answer_does_not_fit_is_not_called_again_on_resume() -> None:
    tool = Tool()
    session = session_on(await engine_at(0), max_tokens=3)
    await converse(session, tool)
    resumed = await converse(session_on(await engine_at(0), session.snapshot(), max_tokens=3), tool)
    assert (resumed.length, tool.calls) == (3, 1)


async def test_a_sample_interrupted_within_a_turn_continues_after_its_last_token() -> None:
    engine = await engine_at(3, tokens_per_s=50.0)
    session = session_on(engine)
    running = asyncio.create_task(converse(session, Tool()))
    while (snapshot := session.snapshot()) is None or snapshot.length < 2:
        await asyncio.sleep(0.001)
    running.cancel()
    snapshot.validate()
    assert (snapshot.turns, snapshot.finish_reason) == ([Turn(0, 2, True)], "")

    other, tool = await engine_at(5), Tool()
    sample = await converse(session_on(other, snapshot), tool)
    sample.validate()
    assert sample.token_ids().tolist() == [1, 2, STOP, 50, 4, STOP]
    assert sample.spans == [VersionSpan(3, 0, 2), VersionSpan(5, 2, 6)]
    assert tool.calls == 1


async def test_recorded_answers_are_not_requested_again() -> None:
    session, tool = session_on(await engine_at(3)), Tool()
    await session.turn()
    await session.observe(tool)
    snapshot = session.snapshot()
    assert snapshot is not None
    assert [turn.by_policy for turn in snapshot.turns] == [True, False]
    sample = await converse(session_on(await engine_at(4), snapshot), tool)
    assert (sample.token_ids().tolist(), tool.calls) == ([1, 2, STOP, 50, 4, STOP], 1)
    assert sample.spans == [VersionSpan(3, 0, 4), VersionSpan(4, 4, 6)]


async def test_an_empty_observation_does_not_end_the_record() -> None:
    calls = 0

    async def empty_observation() -> Sequence[int]:
        nonlocal calls
        calls += 1
        return []

    async def play(session: SampleSession) -> None:
        await session.turn()
        await session.observe(empty_observation)
        await session.observe(empty_observation)

    engine = await engine_at(3)
    session = session_on(engine)
    await play(session)
    snapshot = session.snapshot()
    assert snapshot is not None
    snapshot.validate()

    generated = engine.load().generated_tokens
    await play(session_on(engine, snapshot))
    assert (calls, engine.load().generated_tokens) == (2, generated)


async def test_a_recorded_complete_turn_is_not_continued() -> None:
    session = session_on(await engine_at(3))
    await session.turn()
    snapshot = session.snapshot()
    assert snapshot is not None
    again = session_on(await engine_at(4), snapshot)
    generation = await again.turn()
    assert (generation.tokens.tolist(), generation.finish_reason) == ([1, 2, STOP], "stop")


@pytest.mark.parametrize("how", ["keep", "recompute", "drain", "abort"])
async def test_every_interruption_keeps_generated_tokens(how: str) -> None:
    engine = await engine_at(3, tokens_per_s=50.0)
    session = session_on(engine)
    turn = asyncio.create_task(session.turn())
    while (snapshot := session.snapshot()) is None or snapshot.length < 1:
        await asyncio.sleep(0.001)
    await update(engine, 4, how)
    generation = await turn
    assert session.is_cut_short == (how == "abort")
    sample = session.sample("text")
    if how == "abort":
        sample = await converse(session_on(engine, sample), Tool())
    assert generation.tokens.tolist()[:1] == [1]
    versions = sample.token_versions().tolist()
    assert versions[0] == 3
    assert (4 in versions) == (how != "drain")
