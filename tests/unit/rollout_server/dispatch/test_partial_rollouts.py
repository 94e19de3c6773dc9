"""Generated tokens survive stops and crashes: no server generates them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_grpo.errors import EngineError
from async_grpo.weights.manifest import WeightVersion
from async_grpo.wire import Group, Ticket
from buffer import InMemoryBuffer
from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.scripted import ScriptedEngine
from tests.support.rollout_fakes import FakeReceiver, buffer_of, config_of, context_of, dispatching, until_buffer
from tests.support.waiting import until

LENGTH = 40


def letters(request: GenerationRequest) -> list[int]:
    """Letters that depend on the position only, so that a resumed sample equals an uninterrupted one."""
    return [ord("a") + position % 26 for position in range(LENGTH)]


COMPLETE_SAMPLE = letters(GenerationRequest("", [], 1))


def config(**rollout: Any) -> Any:
    rollout = {"max_concurrency": 8, "progress_interval_s": 3600.0, **rollout}
    redis = {"timeout_s": rollout.get("lease_s", 30.0)}
    return config_of(max_staleness=0, groups_per_step=1, sampling={"max_tokens": LENGTH}, rollout=rollout, redis=redis)


async def start_engine(tokens_per_s: float = 200.0) -> ScriptedEngine:
    engine = ScriptedEngine(letters, tokens_per_s=tokens_per_s)
    await engine.start()
    return engine


async def until_generated(engine: ScriptedEngine, tokens: int) -> None:
    await until(lambda: engine.load().generated_tokens >= tokens)


async def saved_tokens(buffer: InMemoryBuffer) -> int:
    """Tokens of the partial of group 0."""
    (ticket,) = await peek_tickets(buffer)
    return 0 if ticket.partial is None else sum(sample.length for sample in ticket.partial.samples if sample)


async def peek_tickets(buffer: InMemoryBuffer) -> list[Ticket]:
    """Take the lease of group 0 and give it back."""
    tickets = await buffer.admit_groups(1, holder="observer", timeout_s=1.0)
    for ticket in tickets:
        await buffer.give_back(ticket)
    return tickets


async def take_group(buffer: InMemoryBuffer) -> Group:
    await until_buffer(buffer, lambda stats: stats.ready == 1)
    (group,) = (await buffer.take_batch(epoch=0, version=0, timeout_s=1.0)).groups
    return group


def check_complete(group: Group, samples: int = 4) -> None:
    assert len(group.samples) == samples
    for sample in group.samples:
        sample.validate()
        assert sample.token_ids().tolist() == COMPLETE_SAMPLE


async def test_a_stopped_server_leaves_every_token_to_the_next(tmp_path: Path) -> None:
    settings = config()
    buffer, first = buffer_of(settings), await start_engine()
    async with dispatching(context_of(tmp_path, settings, first, buffer)):
        await until_generated(first, 40)
    generated = first.load().generated_tokens
    assert await saved_tokens(buffer) == generated
    second = await start_engine(5000.0)
    async with dispatching(context_of(tmp_path, settings, second, buffer, name="rollout-1")):
        check_complete(await take_group(buffer))
    assert generated + second.load().generated_tokens == 4 * LENGTH


async def test_a_killed_server_loses_only_tokens_since_its_last_save(tmp_path: Path) -> None:
    settings = config(progress_interval_s=0.02, lease_s=0.2)
    buffer, first = buffer_of(settings), await start_engine()
    context = context_of(tmp_path, settings, first, buffer)
    async with dispatching(context) as (_, running):
        await until_generated(first, 60)
        first.fail = lambda reason="": None  # type: ignore[method-assign]
        context.buffer.progress = context.buffer.give_back = ignore_call  # type: ignore[method-assign]
        running.cancel()
    second = await start_engine(5000.0)
    async with dispatching(context_of(tmp_path, settings, second, restore_calls(buffer), name="rollout-1")):
        check_complete(await take_group(buffer))
    regenerated = first.load().generated_tokens + second.load().generated_tokens - 4 * LENGTH
    assert 0 <= regenerated <= 40


async def ignore_call(*arguments: Any, **options: Any) -> None:
    """Calls of a dead server do not arrive."""


def restore_calls(buffer: InMemoryBuffer) -> InMemoryBuffer:
    """The same buffer, reachable again for another server."""
    del buffer.progress, buffer.give_back
    return buffer


async def test_no_token_is_lost_when_the_engine_dies(tmp_path: Path) -> None:
    settings = config()
    buffer, first = buffer_of(settings), await start_engine()
    async with dispatching(context_of(tmp_path, settings, first, buffer)) as (_, running):
        await until_generated(first, 40)
        first.fail()
        with pytest.raises(ExceptionGroup) as errors:
            await running
        assert errors.group_contains(EngineError, match="died")
    assert await saved_tokens(buffer) == first.load().generated_tokens


@pytest.mark.parametrize(("max_interruptions", "attempt"), [(9, 4), (1, 2)])
async def test_abort_gives_a_group_back_at_most_max_interruptions_times(
    tmp_path: Path, max_interruptions: int, attempt: int
) -> None:
    settings = config(interruption="abort", max_interruptions=max_interruptions)
    buffer, engine, receiver = buffer_of(settings), await start_engine(), FakeReceiver(WeightVersion(1, 0))
    async with dispatching(context_of(tmp_path, settings, engine, buffer), receiver):
        for version, tokens in [(1, 30), (2, 70), (3, 110)]:
            await until_generated(engine, tokens)
            await receiver.publish(1, version)
        group = await take_group(buffer)
    check_complete(group)
    assert group.attempt == attempt
    assert engine.load().generated_tokens == 4 * LENGTH
    assert all([span.version for span in sample.spans] == [0, 1, 2, 3] for sample in group.samples)


async def test_over_sampling_keeps_the_samples_that_finish_first(tmp_path: Path) -> None:
    def unequal(request: GenerationRequest) -> list[int]:
        index = int(request.request_id.split("-")[2].split(".")[0])
        return COMPLETE_SAMPLE[: 4 + 6 * index]

    settings = config(oversample=2)
    engine = ScriptedEngine(unequal, tokens_per_s=200.0)
    await engine.start()
    buffer = buffer_of(settings)
    async with dispatching(context_of(tmp_path, settings, engine, buffer)):
        group = await take_group(buffer)
        await until(lambda: engine.load().running == 0)
    assert [sample.length for sample in group.samples] == [4, 10, 16, 22]
    assert engine.load().generated_tokens < 4 + 10 + 16 + 22 + 28 + 34
