"""Pausing and draining: no new groups, none in flight are lost, and a drained server ends by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from async_grpo.weights.manifest import WeightVersion
from async_grpo.wire import Ticket
from buffer import InMemoryBuffer
from rollout_server.dispatch import admission
from rollout_server.dispatch.admission import AdmissionGate, TaskFeeder
from rollout_server.engines.scripted import ScriptedEngine
from rollout_server.server import RolloutServer
from tests.support.http_fakes import ServerHarness, dispatching, make_harness
from tests.support.rollout_fakes import (
    FakeEngine,
    FakeReceiver,
    buffer_of,
    config_of,
    context_of,
    until_buffer,
    watcher_of,
)
from tests.support.waiting import until


async def make_blocked_harness(tmp_path: Path, buffer: InMemoryBuffer) -> ServerHarness:
    """A server whose requests (two groups of four) finish only when the test releases them."""
    engine = FakeEngine()
    engine.hold = True
    return await make_harness(tmp_path, engine, config=config_of(), buffer=buffer, version=0)


async def until_engine_is_full(harness: ServerHarness) -> None:
    await until(lambda: len(harness.engine.held) == 8)


async def test_a_paused_server_finishes_its_groups_and_starts_no_new_ones(tmp_path: Path) -> None:
    buffer = buffer_of(config_of())
    harness = await make_blocked_harness(tmp_path, buffer)
    async with dispatching(harness):
        await until_engine_is_full(harness)
        harness.dispatcher.admission.pause()
        harness.engine.hold = False
        harness.engine.release()
        await until(lambda: harness.dispatcher.counters.groups["inserted"] == 2)
        await asyncio.sleep(0.05)
        assert (len(harness.dispatcher.groups), (await buffer.stats()).ready) == (0, 2)
        harness.dispatcher.admission.resume()
        await until(lambda: harness.dispatcher.counters.groups["inserted"] == 4)


async def test_a_ticket_that_arrives_after_a_pause_is_given_back(tmp_path: Path) -> None:
    config = config_of()
    buffer = buffer_of(config)
    harness = await make_harness(tmp_path, FakeEngine(), config=config, buffer=buffer, version=0)
    running = asyncio.create_task(harness.dispatcher.run_until_end())
    await until(lambda: harness.dispatcher.ticket_wait_since_s is not None)
    harness.dispatcher.admission.pause()
    await buffer.put_tasks([harness.context.source.task(0)])
    await until_buffer(buffer, lambda stats: stats.admitted > 0)
    (ticket,) = await buffer.admit_groups(1, holder="rollout-1", timeout_s=2.0)
    assert ticket.seq == 0
    assert not harness.engine.requests
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


class SlowGiveBack(InMemoryBuffer):
    """`give_back` blocks until the test sets `may_give_back`."""

    may_give_back: asyncio.Event

    async def give_back(self, ticket: Ticket, *, count_as_expired: bool = False) -> None:
        await self.may_give_back.wait()
        await super().give_back(ticket, count_as_expired=count_as_expired)


@pytest.mark.parametrize("stop", ["drain", "cancel"])
async def test_a_stop_does_not_lose_tickets_that_are_being_given_back(tmp_path: Path, stop: str) -> None:
    config = config_of()
    buffer = SlowGiveBack(config.replay_policy, lease_s=config.lease_s, max_attempts=1)
    buffer.may_give_back = asyncio.Event()
    harness = await make_harness(tmp_path, FakeEngine(), config=config, buffer=buffer, version=0)
    running = asyncio.create_task(harness.dispatcher.run_until_end())
    await until(lambda: harness.dispatcher.ticket_wait_since_s is not None)
    harness.dispatcher.admission.pause()
    await buffer.put_tasks([harness.context.source.task(index) for index in range(2)])
    await until_buffer(buffer, lambda stats: stats.admitted > 0)
    if stop == "drain":
        harness.dispatcher.admission.drain()
    else:
        running.cancel()
    await asyncio.sleep(0.01)
    buffer.may_give_back.set()
    async with asyncio.timeout(5):
        await asyncio.gather(running, return_exceptions=True)
    again = await buffer.admit_groups(2, holder="rollout-1", timeout_s=1.0)
    assert [(ticket.seq, ticket.attempt) for ticket in again] == [(0, 2), (1, 2)]


async def test_a_draining_dispatcher_ends_when_its_groups_have_finished(tmp_path: Path) -> None:
    buffer = buffer_of(config_of())
    harness = await make_blocked_harness(tmp_path, buffer)
    async with dispatching(harness) as running:
        await until_engine_is_full(harness)
        harness.dispatcher.admission.drain()
        await asyncio.sleep(0.02)
        assert not running.done()
        harness.engine.hold = False
        harness.engine.release()
        async with asyncio.timeout(5):
            await running
    assert (await buffer.stats()).ready == 2


async def test_an_urgent_drain_gives_all_groups_back_with_partials(tmp_path: Path) -> None:
    config = config_of(sampling={"max_tokens": 40}, rollout={"vllm": {"max_model_len": 256}})
    buffer = buffer_of(config)
    engine = ScriptedEngine(lambda request: [ord("a")] * 40, tokens_per_s=100)
    await engine.start()
    harness = await make_harness(tmp_path, engine, config=config, buffer=buffer, version=0)
    async with dispatching(harness) as running:
        await until(lambda: engine.load().generated_tokens >= 8 and len(harness.dispatcher.groups) > 0)
        harness.dispatcher.admission.drain(now=True)
        await buffer.publish_version(epoch=0, version=0)
        async with asyncio.timeout(15):
            await running
    assert (await buffer.stats()).ready == 0
    (ticket,) = await buffer.admit_groups(1, holder="rollout-1", timeout_s=1.0)
    assert ticket.partial is not None
    assert ticket.partial.longest >= 1


async def test_groups_unfinished_at_the_drain_timeout_are_given_back(tmp_path: Path) -> None:
    config = config_of(rollout={"max_concurrency": 8, "http": {"drain_timeout_s": 0.05}})
    buffer = buffer_of(config)
    engine = FakeEngine()
    engine.hold = True
    harness = await make_harness(tmp_path, engine, config=config, buffer=buffer, version=0)
    async with dispatching(harness) as running:
        await until_engine_is_full(harness)
        harness.dispatcher.admission.drain()
        async with asyncio.timeout(5):
            await running
    assert len(await buffer.admit_groups(1, holder="rollout-1", timeout_s=1.0)) == 1


async def test_a_drained_server_ends_without_the_final_evaluation(tmp_path: Path) -> None:
    config = config_of(eval={"prompts": 1, "greedy": False, "samples": 1})
    buffer = buffer_of(config)
    context = context_of(tmp_path, config, FakeEngine(), buffer)
    watcher = watcher_of(context, FakeReceiver(WeightVersion(1, 0)))
    await watcher.wait_for_initial_weights(1.0)
    server = RolloutServer(context, watcher)
    serving = asyncio.create_task(server.serve())
    await until_buffer(buffer, lambda stats: stats.ready >= 4)
    server._dispatcher.admission.drain(now=True)
    async with asyncio.timeout(15):
        await serving
    stats = await buffer.stats()
    assert not stats.ended
    assert (stats.inflight, stats.ready) == (0, 4)


def test_draining_is_final() -> None:
    admission = AdmissionGate()
    admission.drain()
    admission.resume()
    admission.pause()
    assert admission.is_draining


async def test_tasks_of_a_slow_source_are_appended_early_and_starvation_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "READ_BUDGET_S", 0.0)  # one row takes longer
    monkeypatch.setattr(admission, "MIN_STARVATION_S", 0.0)
    config = config_of()
    reports: list[tuple[float, float]] = []
    buffer = buffer_of(config)
    source = context_of(tmp_path, config, FakeEngine()).source
    feeder = TaskFeeder(buffer, source, target=4, report_starvation=lambda *span: reports.append(span))
    feeding = asyncio.create_task(feeder.run_feeding())
    await until_buffer(buffer, lambda stats: stats.waiting == 4)
    assert (await buffer.stats()).tasks_put == 4
    assert len(reports) == 1  # for the first row only; afterwards a task was waiting
    await buffer.admit_groups(1, holder="a", timeout_s=1.0)
    feeder.request_top_up()
    await asyncio.sleep(0)
    feeding.cancel()
    assert len(reports) == 1
