"""Pausing and draining: nothing new comes in, nothing in flight is lost, and the server leaves by itself."""

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
from tests.support.http_fakes import House, dispatching, house_of
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


async def held_house(tmp_path: Path, buffer: InMemoryBuffer) -> House:
    """Two groups of four, none of which finishes before it may."""
    engine = FakeEngine()
    engine.hold = True
    return await house_of(tmp_path, engine, config=config_of(), buffer=buffer, version=0)


async def full(house: House) -> None:
    await until(lambda: len(house.engine.held) == 8)


async def test_a_paused_server_finishes_what_it_has_and_takes_nothing_new(tmp_path: Path) -> None:
    buffer = buffer_of(config_of())
    house = await held_house(tmp_path, buffer)
    async with dispatching(house):
        await full(house)
        house.dispatcher.admission.pause()
        house.engine.hold = False
        house.engine.release()
        await until(lambda: house.dispatcher.counters.groups["inserted"] == 2)
        await asyncio.sleep(0.05)
        assert (len(house.dispatcher.groups), (await buffer.stats()).ready) == (0, 2)
        house.dispatcher.admission.resume()
        await until(lambda: house.dispatcher.counters.groups["inserted"] == 4)


async def test_a_ticket_that_comes_after_the_pause_is_given_back(tmp_path: Path) -> None:
    config = config_of()
    buffer = buffer_of(config)
    house = await house_of(tmp_path, FakeEngine(), config=config, buffer=buffer, version=0)
    running = asyncio.create_task(house.dispatcher.run())
    await until(lambda: house.dispatcher.asking_since_s is not None)
    house.dispatcher.admission.pause()
    await buffer.put_tasks([house.context.source.task(0)])
    await until_buffer(buffer, lambda stats: stats.admitted > 0)
    (ticket,) = await buffer.admit_groups(1, holder="rollout-1", timeout_s=2.0)
    assert ticket.seq == 0
    assert not house.engine.requests
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


class Slow(InMemoryBuffer):
    """Its answers to `admit_groups` and `give_back` take until the test has let them go."""

    slow: asyncio.Event

    async def give_back(self, ticket: Ticket, *, count_as_expired: bool = False) -> None:
        await self.slow.wait()
        await super().give_back(ticket, count_as_expired=count_as_expired)


@pytest.mark.parametrize("stop", ["drain", "cancel"])
async def test_tickets_on_their_way_back_after_a_pause_survive_a_stop(tmp_path: Path, stop: str) -> None:
    config = config_of()
    buffer = Slow(config.replay_policy, lease_s=config.lease_s, max_attempts=1)
    buffer.slow = asyncio.Event()
    house = await house_of(tmp_path, FakeEngine(), config=config, buffer=buffer, version=0)
    running = asyncio.create_task(house.dispatcher.run())
    await until(lambda: house.dispatcher.asking_since_s is not None)
    house.dispatcher.admission.pause()
    await buffer.put_tasks([house.context.source.task(index) for index in range(2)])
    await until_buffer(buffer, lambda stats: stats.admitted > 0)
    if stop == "drain":
        house.dispatcher.admission.drain()
    else:
        running.cancel()
    await asyncio.sleep(0.01)
    buffer.slow.set()
    async with asyncio.timeout(5):
        await asyncio.gather(running, return_exceptions=True)
    again = await buffer.admit_groups(2, holder="rollout-1", timeout_s=1.0)
    assert [(ticket.seq, ticket.attempt) for ticket in again] == [(0, 2), (1, 2)]


async def test_a_drained_dispatcher_ends_when_its_groups_have_finished(tmp_path: Path) -> None:
    buffer = buffer_of(config_of())
    house = await held_house(tmp_path, buffer)
    async with dispatching(house) as running:
        await full(house)
        house.dispatcher.admission.drain()
        await asyncio.sleep(0.02)
        assert not running.done()
        house.engine.hold = False
        house.engine.release()
        async with asyncio.timeout(5):
            await running
    assert (await buffer.stats()).ready == 2


async def test_a_dispatcher_drained_in_a_hurry_gives_everything_back_with_partials(tmp_path: Path) -> None:
    config = config_of(sampling={"max_tokens": 40}, rollout={"vllm": {"max_model_len": 256}})
    buffer = buffer_of(config)
    engine = ScriptedEngine(lambda request: [ord("a")] * 40, tokens_per_s=100)
    await engine.start()
    house = await house_of(tmp_path, engine, config=config, buffer=buffer, version=0)
    async with dispatching(house) as running:
        await until(lambda: engine.load().generated_tokens >= 8 and len(house.dispatcher.groups) > 0)
        house.dispatcher.admission.drain(now=True)
        await buffer.publish_version(epoch=0, version=0)
        async with asyncio.timeout(15):
            await running
    assert (await buffer.stats()).ready == 0
    (ticket,) = await buffer.admit_groups(1, holder="rollout-1", timeout_s=1.0)
    assert ticket.partial is not None
    assert ticket.partial.longest >= 1


async def test_what_does_not_finish_in_time_is_given_back(tmp_path: Path) -> None:
    config = config_of(rollout={"max_concurrency": 8, "http": {"drain_timeout_s": 0.05}})
    buffer = buffer_of(config)
    engine = FakeEngine()
    engine.hold = True
    house = await house_of(tmp_path, engine, config=config, buffer=buffer, version=0)
    async with dispatching(house) as running:
        await full(house)
        house.dispatcher.admission.drain()
        async with asyncio.timeout(5):
            await running
    assert len(await buffer.admit_groups(1, holder="rollout-1", timeout_s=1.0)) == 1


async def test_a_drained_server_leaves_without_the_final_evaluation(tmp_path: Path) -> None:
    config = config_of(eval={"prompts": 1, "greedy": False, "samples": 1})
    buffer = buffer_of(config)
    context = context_of(tmp_path, config, FakeEngine(), buffer)
    watcher = watcher_of(context, FakeReceiver(WeightVersion(1, 0)))
    await watcher.first(1.0)
    server = RolloutServer(context, watcher)
    serving = asyncio.create_task(server.serve())
    await until_buffer(buffer, lambda stats: stats.ready >= 4)
    server._dispatcher.admission.drain(now=True)
    async with asyncio.timeout(15):
        await serving
    stats = await buffer.stats()
    assert not stats.ended
    assert (stats.inflight, stats.ready) == (0, 4)


def test_a_server_that_drains_cannot_be_called_back() -> None:
    admission = AdmissionGate()
    admission.drain()
    admission.resume()
    admission.pause()
    assert admission.is_draining


async def test_what_a_slow_source_gives_is_appended_at_once_and_the_time_without_tasks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "READ_S", 0.0)  # one row takes longer
    monkeypatch.setattr(admission, "NOTED_S", 0.0)
    config, told = config_of(), list[tuple[float, float]]()
    buffer = buffer_of(config)
    source = context_of(tmp_path, config, FakeEngine()).source
    feeder = TaskFeeder(buffer, source, target=4, starved=lambda *span: told.append(span))
    feeding = asyncio.create_task(feeder.run())
    await until_buffer(buffer, lambda stats: stats.waiting == 4)
    assert (await buffer.stats()).tasks_put == 4
    assert len(told) == 1  # of the first row; then one was waiting
    await buffer.admit_groups(1, holder="a", timeout_s=1.0)
    feeder.notify()
    await asyncio.sleep(0)
    feeding.cancel()
    assert len(told) == 1
