"""The dispatcher admits groups continuously, within the staleness window, and loses none."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog

from async_grpo.errors import ConfigError, EngineError
from async_grpo.utils.aio import cancel_and_wait, root_cause
from async_grpo.weights.manifest import WeightVersion
from async_grpo.wire import Sample, Task, Ticket, VersionSpan, logprobs_to_bytes, tokens_to_bytes
from buffer import InMemoryBuffer
from rollout_server.dispatch import admission
from rollout_server.dispatch.admission import TaskFeeder
from rollout_server.dispatch.group_rollout import GroupRollout
from rollout_server.engines.base import GenerationRequest, sample_seed
from tests.support.rollout_fakes import (
    FakeEngine,
    FakePool,
    FakeReceiver,
    buffer_of,
    config_of,
    context_of,
    dispatching,
    until_buffer,
)
from tests.support.waiting import until


async def ready(buffer: InMemoryBuffer, groups: int) -> None:
    await until_buffer(buffer, lambda stats: stats.ready >= groups)


async def test_tickets_become_inserted_groups(tmp_path: Path) -> None:
    config = config_of()
    buffer = buffer_of(config)
    async with dispatching(context_of(tmp_path, config, FakeEngine(), buffer)):
        await ready(buffer, 4)
    batch = await buffer.take_batch(epoch=0, version=0, timeout_s=1.0)
    assert [group.seq for group in batch.groups] == [0, 1]
    assert all(sample.reward == 1.0 and sample.text == "yes" for group in batch.groups for sample in group.samples)
    for group in batch.groups:
        for sample in group.samples:
            sample.validate()


async def test_admission_stops_at_the_staleness_window(tmp_path: Path) -> None:
    config = config_of(max_staleness=1)
    buffer = buffer_of(config)
    async with dispatching(context_of(tmp_path, config, FakeEngine(), buffer)):
        await ready(buffer, 4)
        await asyncio.sleep(0.05)
        assert (await buffer.stats()).admitted == config.capacity_groups == 4


async def test_the_engine_stays_full_and_is_never_overfilled(tmp_path: Path) -> None:
    config = config_of(max_staleness=8, rollout={"max_concurrency": 6})
    engine = FakeEngine()
    engine.hold = True
    async with dispatching(context_of(tmp_path, config, engine)) as (dispatcher, _):
        await until(lambda: len(engine.held) == 6)
        for _ in range(12):
            engine.release(next(iter(engine.held)))
            await until(lambda: len(engine.held) == 6)
            assert dispatcher.slots.reserved <= 6 - 1 + 4
        assert engine.peak == 6


async def test_all_free_slots_are_filled_with_one_request(tmp_path: Path) -> None:
    config = config_of(max_staleness=8, rollout={"max_concurrency": 10})
    buffer = buffer_of(config)
    limits: list[int] = []
    admit = buffer.admit_groups

    async def record_limit(limit: int, **options: Any) -> list[Ticket]:
        limits.append(limit)
        return await admit(limit, **options)

    buffer.admit_groups = record_limit  # type: ignore[method-assign]
    engine = FakeEngine()
    engine.hold = True
    async with dispatching(context_of(tmp_path, config, engine, buffer)) as (dispatcher, _):
        await until(lambda: len(engine.held) == 10)
        assert (limits, dispatcher.slots.reserved) == ([3], 12)


async def test_a_new_group_starts_while_another_is_unfinished(tmp_path: Path) -> None:
    config = config_of(max_staleness=8, rollout={"max_concurrency": 4})
    engine = FakeEngine()
    engine.hold = True
    async with dispatching(context_of(tmp_path, config, engine)):
        await until(lambda: len(engine.held) == 4)
        straggler, *others = engine.held
        engine.release(*others)
        await until(lambda: len(engine.held) == 4)
        assert straggler in engine.held


async def test_verification_does_not_stall_the_engine(tmp_path: Path) -> None:
    config = config_of(max_staleness=8, rollout={"max_concurrency": 4})
    engine = FakeEngine()
    context = context_of(tmp_path, config, engine)
    assert isinstance(context.pool, FakePool)
    context.pool.gate = asyncio.Event()
    async with dispatching(context):
        await until(lambda: len(engine.requests) >= 16)
        assert (await context.buffer.stats()).ready == 0
        context.pool.gate.set()


async def test_samples_wait_for_the_version_of_their_ticket(tmp_path: Path) -> None:
    config = config_of()
    buffer = buffer_of(config)
    engine, receiver = FakeEngine(), FakeReceiver(WeightVersion(1, 0))
    await buffer.publish_version(epoch=0, version=1)
    async with dispatching(context_of(tmp_path, config, engine, buffer), receiver):
        await asyncio.sleep(0.05)
        assert engine.requests == []
        await receiver.publish(1, 1)
        await ready(buffer, 4)
    assert set(engine.versions) == {1}


async def test_without_staleness_every_group_has_the_trainers_version(tmp_path: Path) -> None:
    config = config_of(max_staleness=0)
    buffer = buffer_of(config)
    receiver = FakeReceiver(WeightVersion(1, 0))
    async with dispatching(context_of(tmp_path, config, FakeEngine(), buffer), receiver):
        for version in range(config.steps):
            batch = await buffer.take_batch(epoch=0, version=version, timeout_s=5.0)
            assert {group.oldest_version for group in batch.groups} == {version}
            await receiver.publish(1, version + 1)
            await buffer.publish_version(epoch=0, version=version + 1)
            await buffer.release_batch(batch)


async def test_another_server_generates_the_samples_that_a_stopped_one_has_not_finished(tmp_path: Path) -> None:
    config = config_of(max_staleness=0, groups_per_step=1)
    buffer = buffer_of(config)
    engine = FakeEngine()
    engine.hold = True
    async with dispatching(context_of(tmp_path, config, engine, buffer)):
        await until(lambda: len(engine.held) == 4)
        engine.release(*list(engine.held)[:3])
        await until(lambda: len(engine.held) == 1)
        await asyncio.sleep(0.01)

    other = FakeEngine()
    async with dispatching(context_of(tmp_path, config, other, buffer, name="rollout-1")):
        await ready(buffer, 1)
    assert len(other.requests) == 1
    (group,) = (await buffer.take_batch(epoch=0, version=0, timeout_s=1.0)).groups
    assert (group.attempt, group.server, len(group.samples)) == (2, "rollout-1", 4)


async def test_a_group_whose_lease_was_lost_is_dropped(tmp_path: Path) -> None:
    config = config_of(max_staleness=0, groups_per_step=1)
    buffer = buffer_of(config)
    engine = FakeEngine()
    engine.hold = True
    async with dispatching(context_of(tmp_path, config, engine, buffer)) as (dispatcher, _):
        await until(lambda: len(engine.held) == 4)
        (group,) = dispatcher.groups
        await buffer.give_back(group.ticket)
        await buffer.admit_groups(1, holder="rollout-1", timeout_s=1.0)
        await dispatcher.groups.renew_leases()
        await until(lambda: engine.held == {} and dispatcher.slots.reserved == 0)
        assert dispatcher.groups.lost_leases == 1
        assert list(dispatcher.groups) == []


@pytest.mark.parametrize(
    ("answers", "dynamic_sampling", "reason"),
    [
        (["yes", "yes", "yes", "yes"], True, "filtered"),
        (["yes", "?", "?", "?"], False, "unverifiable"),
    ],
)
async def test_a_group_that_cannot_be_trained_is_discarded_with_its_reason(
    tmp_path: Path, answers: list[str], dynamic_sampling: bool, reason: str
) -> None:
    config = config_of(rollout={"max_concurrency": 4, "dynamic_sampling": dynamic_sampling})
    buffer = buffer_of(config)
    engine = FakeEngine(lambda request: answers[int(float(request.request_id.split("-")[2]))])
    context = context_of(tmp_path, config, engine, buffer)
    async with dispatching(context):
        await until_buffer(buffer, lambda stats: stats.released.get(reason, 0) >= 2)
        assert (await buffer.stats()).ready == 0


async def test_a_group_with_two_rewards_is_trained_and_the_others_are_masked(tmp_path: Path) -> None:
    config = config_of()
    buffer = buffer_of(config)
    answers = ["yes", "no", "?", "?"]
    engine = FakeEngine(lambda request: answers[int(float(request.request_id.split("-")[2]))])
    context = context_of(tmp_path, config, engine, buffer)
    async with dispatching(context):
        await ready(buffer, 2)
    group = (await buffer.take_batch(epoch=0, version=0, timeout_s=1.0)).groups[0]
    assert [sample.reward for sample in group.samples] == [1.0, 0.0, None, None]
    assert group.samples[2].unverifiable == "raised: cannot say"
    assert (await context.board.counters())["reward_failures.raised"] >= 4


async def test_a_failing_workflow_fails_its_group_and_not_the_server(tmp_path: Path) -> None:
    config = config_of()
    buffer = buffer_of(config)

    def answer(request: GenerationRequest) -> str:
        if request.request_id.startswith("0-"):
            raise ValueError("a bug in a workflow")
        return "yes"

    engine = FakeEngine(answer)
    async with dispatching(context_of(tmp_path, config, engine, buffer)):
        await ready(buffer, 2)
    assert (await buffer.stats()).released["failed"] == 1


async def test_an_invalid_sample_fails_its_group(tmp_path: Path) -> None:
    config = config_of()
    buffer = buffer_of(config)
    engine = FakeEngine(lambda request: "" if request.request_id.startswith("0-") else "yes")
    with structlog.testing.capture_logs() as logs:
        async with dispatching(context_of(tmp_path, config, engine, buffer)):
            await ready(buffer, 2)
    assert (await buffer.stats()).released["failed"] == 1
    (why,) = [entry["why"] for entry in logs if entry["event"] == "group discarded"]
    assert why == "workflow_error: rollout-0 generated an invalid sample: a sample has no tokens"


async def test_a_stop_succeeds_although_the_buffer_accepts_no_groups_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of()
    buffer, engine = buffer_of(config), FakeEngine()
    engine.hold = True
    monkeypatch.setattr("rollout_server.dispatch.dispatcher.GIVE_BACK_TIMEOUT_S", 0.01)
    monkeypatch.setattr(buffer, "give_back", lambda ticket, count_as_expired: asyncio.sleep(3600))
    async with dispatching(context_of(tmp_path, config, engine, buffer)) as (_, running):
        await until(lambda: len(engine.held) > 0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_a_server_gives_up_with_the_reason_if_every_group_fails(tmp_path: Path) -> None:
    config = config_of()
    async with dispatching(context_of(tmp_path, config, FakeEngine(lambda request: "?"))) as (_, running):
        with pytest.raises(ExceptionGroup) as raised:
            await running
    cause = root_cause(raised.value)
    assert isinstance(cause, ConfigError), "a restart would not help"
    assert re.search("128 samples in a row.* raised: cannot say", str(cause))


async def test_tickets_are_given_back_when_the_engine_dies(tmp_path: Path) -> None:
    config = config_of()
    buffer = buffer_of(config)
    engine = FakeEngine()
    engine.error = EngineError("rollout-0: the engine died")
    async with dispatching(context_of(tmp_path, config, engine, buffer)) as (_, running):
        with pytest.raises(ExceptionGroup) as raised:
            await running
    assert isinstance(root_cause(raised.value), EngineError)
    tickets = await buffer.admit_groups(1, holder="rollout-1", timeout_s=1.0)
    assert tickets[0].attempt == 2


async def test_another_server_feeds_when_the_claim_of_the_first_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_TASKS_PER_APPEND", 3)
    config = config_of()
    buffer = buffer_of(config)
    claim_holder = "rollout-0"
    appended: list[int] = []
    source = context_of(tmp_path, config, FakeEngine()).source

    def feeder(name: str) -> TaskFeeder:
        async def claim() -> bool:
            return name == claim_holder

        return TaskFeeder(buffer, source, target=8, claim=claim)

    put_tasks = buffer.put_tasks

    async def record_put_tasks(tasks: Sequence[Task]) -> int:
        appended.append(len(tasks))
        return await put_tasks(tasks)

    monkeypatch.setattr(buffer, "put_tasks", record_put_tasks)
    assert not await feeder("rollout-1").top_up_buffer() and not appended
    first = feeder("rollout-0")
    assert [await first.top_up_buffer() for _ in range(4)] == [True] * 4 and appended == [3, 3, 2]
    assert await feeder("rollout-1").top_up_buffer()  # the buffer is full, so the claim does not matter
    await buffer.admit_groups(4, holder="a", timeout_s=1.0)
    monkeypatch.setattr(admission, "FEEDER_TTL_S", 0.01)
    claim_holder = ""
    waiting = asyncio.create_task(feeder("rollout-1").run_feeding())
    await asyncio.sleep(0)
    claim_holder = "rollout-1"  # the claim of rollout-0 has expired
    await until(lambda: len(appended) > 3)
    await cancel_and_wait(waiting)


async def test_a_resumed_group_requires_the_version_of_its_newest_token(tmp_path: Path) -> None:
    config = config_of()
    buffer = buffer_of(config)
    await TaskFeeder(buffer, context_of(tmp_path, config, FakeEngine()).source, target=4).top_up_buffer()
    (ticket,) = await buffer.admit_groups(1, holder="a", timeout_s=1.0)
    group = GroupRollout.from_ticket(ticket, 4)
    assert (group.remaining_indices, group.required_version) == ([0, 1, 2, 3], 0)
    group.samples[1] = Sample(
        tokens=tokens_to_bytes([1]), logprobs=logprobs_to_bytes([-1.0]), spans=[VersionSpan(5, 0, 1)], finish_reason=""
    )
    assert (group.remaining_indices, group.required_version) == ([0, 1, 2, 3], 5)


@pytest.mark.parametrize(("wanted", "platform"), [(None, "cpu"), (True, "cuda"), (None, "cuda"), (False, "cpu")])
async def test_samples_are_seeded_on_cpus_and_elsewhere_only_on_request(
    tmp_path: Path, wanted: bool | None, platform: str
) -> None:
    config = config_of(rollout={"seed_per_sample": wanted, "vllm": {"platform": platform}})
    engine, buffer = FakeEngine(), buffer_of(config)
    async with dispatching(context_of(tmp_path, config, engine, buffer)):
        await ready(buffer, 2)
    seeded = (wanted, platform) in ((None, "cpu"), (True, "cuda"))
    seeds = [request.seed for request in engine.requests]
    assert len(set(seeds)) == (len(seeds) if seeded else 1) and (None in seeds) == (not seeded)


def test_seeds_depend_on_sample_and_attempt_but_not_on_the_process() -> None:
    names = [(task, index, attempt) for task in (0, 1) for index in (0, 1) for attempt in (1, 2)]
    assert len({sample_seed(1, "train", *name) for name in names}) == len(names)
    assert sample_seed(1, "train", 7, 0, 1) == 8956793425933621076
