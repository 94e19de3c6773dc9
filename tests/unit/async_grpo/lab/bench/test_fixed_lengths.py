"""Completions of prescribed lengths: the workflow of the pipeline's bench, and what it asks of a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.lab.bench.pipeline.fixed_lengths import PrescribedLengths, answer_for, reward
from async_grpo.weights.base import HeldWeights
from async_grpo.wire import Sample, Task, tokens_to_bytes
from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.scripted import ScriptedEngine
from rollout_server.workflows.session import SampleSession
from rollout_server.workflows.testkit import ByteTokenizer

LONGEST = 12
TASK = Task(index=0, prompt="p", prompt_tokens=tokens_to_bytes([112]), answer=answer_for([3, 12, 1]))


def never_stops(_request: GenerationRequest) -> list[int]:
    return [ord("a") + place for place in range(2 * LONGEST)]


async def make(index: int, prior: Sample | None = None) -> Sample:
    engine = ScriptedEngine(never_stops, tokens_per_s=1e5)
    await engine.start()
    await engine.update_weights(HeldWeights.in_store(Path(), epoch=1, version=0), interruption="keep")
    session = SampleSession(engine, "r", [112], seed=1, temperature=1.0, max_tokens=LONGEST, prior=prior, index=index)
    return await PrescribedLengths(ByteTokenizer()).run(TASK, session)


@pytest.mark.parametrize(("index", "length"), [(0, 3), (1, 12), (2, 1), (3, 3), (4, 12)])
async def test_every_sample_has_its_prescribed_length(index: int, length: int) -> None:
    sample = await make(index)
    sample.validate()
    assert (sample.length, sample.finish_reason, len(sample.text)) == (length, "length", length)


async def test_a_resumed_sample_gets_the_same_length() -> None:
    whole = await make(1)
    begun = await make(0)
    prior = Sample(tokens=begun.tokens, logprobs=begun.logprobs, spans=begun.spans, finish_reason="")
    resumed = await make(1, prior)
    assert resumed.token_ids().tolist() == whole.token_ids().tolist()


async def test_a_limit_never_exceeds_max_tokens() -> None:
    engine = ScriptedEngine(never_stops, tokens_per_s=1e5)
    session = SampleSession(engine, "r", [112], seed=1, temperature=1.0, max_tokens=5)
    session.limit(9)
    assert session.tokens_left == 5
    session.limit(2)
    assert session.tokens_left == 2


def test_the_reward_depends_only_on_the_text() -> None:
    texts = [f"{number} {number + 1}" for number in range(50)]
    rewards = [reward(text, "any") for text in texts]
    assert rewards == [reward(text, "another") for text in texts]
    assert all(0.0 <= value <= 1.0 for value in rewards) and len(set(rewards)) > 10
