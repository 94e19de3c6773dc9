"""The weight watcher applies the newest weights, never decreases the version, and respects pins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from async_grpo.errors import EngineError, PublisherLost, WaitTimeout, WeightsReplaced
from async_grpo.telemetry.jsonl import read_rows
from async_grpo.utils.files import DeviceTurn
from async_grpo.weights.manifest import WeightVersion
from rollout_server.weight_watcher import WeightWatcher
from tests.support.rollout_fakes import FakeEngine, FakeReceiver, config_of, context_of, watcher_of
from tests.support.waiting import until


@asynccontextmanager
async def watching(tmp_path: Path, engine: FakeEngine, receiver: FakeReceiver) -> AsyncIterator[WeightWatcher]:
    watcher = watcher_of(context_of(tmp_path, config_of(), engine), receiver)
    await watcher.wait_for_initial_weights(1.0)
    running = asyncio.create_task(watcher.run_updating())
    try:
        yield watcher
    finally:
        running.cancel()


async def test_waiting_for_initial_weights_times_out_without_a_trainer(tmp_path: Path) -> None:
    watcher = watcher_of(context_of(tmp_path, config_of(), FakeEngine()), FakeReceiver())
    with pytest.raises(WaitTimeout, match=r"first publication.*weights\.bind"):
        await watcher.wait_for_initial_weights(0.01)


async def test_new_weights_are_applied_and_waiters_wake(tmp_path: Path) -> None:
    engine, receiver = FakeEngine(), FakeReceiver(WeightVersion(1, 0))
    async with watching(tmp_path, engine, receiver) as watcher:
        waiting = asyncio.create_task(watcher.wait_for_version(2))
        await receiver.publish(1, 1)
        await until(lambda: engine.version == 1)
        assert not waiting.done()
        await receiver.publish(1, 2)
        await asyncio.wait_for(waiting, 1.0)
        assert watcher.updates == 3
        assert (watcher.last_transfer_s, watcher.last_pause_s, watcher.last_load_s) == (0.3, 0.01, 0.004)
    spans = [row for row in read_rows(tmp_path / "timeline" / "rollout-0.jsonl") if row["track"] == "weights"]
    assert [row["args"] for row in spans] == [{"transfer_s": 0.3, "pause_s": 0.01, "load_s": 0.004}] * 3


async def test_waiting_for_an_older_version_returns_immediately(tmp_path: Path) -> None:
    async with watching(tmp_path, FakeEngine(), FakeReceiver(WeightVersion(1, 5))) as watcher:
        await asyncio.wait_for(watcher.wait_for_version(3), 1.0)


async def test_waiting_for_published_weights_times_out_with_the_version(tmp_path: Path) -> None:
    async with watching(tmp_path, FakeEngine(), FakeReceiver(WeightVersion(1, 5))) as watcher:
        with pytest.raises(WaitTimeout, match=r"version 6.*\b5\b"):
            await watcher.wait_for_version(6, timeout_s=0.01)


async def test_a_lost_publisher_does_not_block_the_event_loop(tmp_path: Path) -> None:
    class Lost(FakeReceiver):
        calls = 0

        async def wait_for_newer_version(self, after: WeightVersion, timeout_s: float) -> WeightVersion:
            if self.newest is not None and self.newest > after:
                return self.newest
            self.calls += 1
            raise PublisherLost("silent")

    receiver = Lost(WeightVersion(1, 0))
    async with watching(tmp_path, FakeEngine(), receiver):
        await asyncio.wait_for(asyncio.sleep(0.2), 5.0)
        assert receiver.calls == 1


async def test_an_update_that_never_ends_is_an_engine_error(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.stuck = True
    watcher = watcher_of(
        context_of(tmp_path, config_of(), engine), FakeReceiver(WeightVersion(1, 0)), update_timeout_s=0.01
    )
    with pytest.raises(EngineError, match=r"version 0 of epoch 1 .*0\.01 s"):
        await watcher.wait_for_initial_weights(1.0)


async def test_only_the_newest_weights_are_applied_after_a_pin(tmp_path: Path) -> None:
    engine, receiver = FakeEngine(), FakeReceiver(WeightVersion(1, 0))
    async with watching(tmp_path, engine, receiver) as watcher:
        async with watcher.pin_version() as version:
            assert version == 0
            for newer in (1, 2, 3):
                await receiver.publish(1, newer)
                await asyncio.sleep(0.01)
            assert engine.version == 0
        await until(lambda: engine.version == 3)
        assert engine.updates == [0, 3]


async def test_a_resumed_trainer_never_decreases_the_engines_version(tmp_path: Path) -> None:
    engine, receiver = FakeEngine(), FakeReceiver(WeightVersion(1, 7))
    async with watching(tmp_path, engine, receiver):
        for version in (5, 6, 7, 8):
            await receiver.publish(2, version)
            await asyncio.sleep(0.01)
        assert engine.updates == [7, 7, 8]


async def test_an_older_epoch_is_never_applied_over_a_newer_one(tmp_path: Path) -> None:
    engine, receiver = FakeEngine(), FakeReceiver(WeightVersion(2, 3))
    async with watching(tmp_path, engine, receiver):
        await receiver.publish(1, 9)
        await asyncio.sleep(0.02)
        assert engine.updates == [3]


async def test_weights_replaced_before_loading_are_skipped_for_the_newest(tmp_path: Path) -> None:
    engine, receiver = FakeEngine(), FakeReceiver(WeightVersion(1, 0))
    load = engine.update_weights

    async def replaced_once(store: Path, **keywords: Any) -> float:
        engine.update_weights = load  # type: ignore[method-assign]
        await receiver.publish(1, 2)
        raise WeightsReplaced("the store does not hold version 1.")

    async with watching(tmp_path, engine, receiver) as watcher:
        engine.update_weights = replaced_once  # type: ignore[method-assign]
        await receiver.publish(1, 1)
        await until(lambda: engine.version == 2)
        assert watcher.updates == 2


async def test_weights_are_held_only_while_the_engine_loads_them(tmp_path: Path) -> None:
    engine, receiver = FakeEngine(), FakeReceiver(WeightVersion(1, 0))
    held: list[bool] = []
    load = engine.update_weights

    async def watched(store: Path, **keywords: Any) -> float:
        held.append(receiver.held)
        return await load(store, **keywords)

    engine.update_weights = watched  # type: ignore[method-assign]
    async with watching(tmp_path, engine, receiver) as watcher:
        async with watcher.pin_version():
            await receiver.publish(1, 1)
            await asyncio.sleep(0.01)
            assert not receiver.held
        await until(lambda: engine.version == 1)
        assert held == [True, True]


async def test_the_engine_sleeps_during_a_step_and_updates_after_it(
    tmp_path: Path,
) -> None:
    engine, receiver, trainer = FakeEngine(), FakeReceiver(WeightVersion(1, 0)), DeviceTurn(tmp_path)
    turn = DeviceTurn(tmp_path)
    await turn.use()
    async with watching(tmp_path, engine, receiver) as watcher:
        yielding = asyncio.create_task(watcher.yield_device_to_trainer(turn))
        await asyncio.to_thread(trainer.begin_step, 5.0)
        assert engine.asleep and watcher.is_asleep
        before_s = watcher.awake_s
        await receiver.publish(1, 1)
        await asyncio.sleep(0.03)
        assert (engine.version, watcher.awake_s) == (0, before_s)
        trainer.end_step()
        await until(lambda: engine.version == 1)
        assert not engine.asleep
        assert 0 < watcher.awake_s - before_s < 0.03 + 5 * 0.02
        yielding.cancel()


async def test_an_engine_that_does_not_fall_asleep_is_an_error_and_blocks_the_step(tmp_path: Path) -> None:
    engine, turn = FakeEngine(), DeviceTurn(tmp_path)
    watcher = watcher_of(context_of(tmp_path, config_of(), engine), FakeReceiver(), update_timeout_s=0.01)
    await turn.use()
    engine.stuck = True
    step = asyncio.create_task(asyncio.to_thread(DeviceTurn(tmp_path).begin_step, 0.1))
    with pytest.raises(EngineError, match=r"asleep .*0\.01 s"):
        await watcher.yield_device_to_trainer(turn)
    with pytest.raises(WaitTimeout):
        await step
