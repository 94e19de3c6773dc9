"""Sample slots, and their adaptation to the engine's load."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from async_grpo.config.rollout import RolloutConfig
from rollout_server.dispatch.concurrency import ConcurrencyController, SampleSlots, next_concurrency
from rollout_server.engines.base import EngineLoad
from rollout_server.engines.vllm.engine import VllmEngine
from rollout_server.engines.vllm.requests import EngineRequest
from tests.support.rollout_fakes import FakeEngine


async def occupy_until(slots: SampleSlots, event: asyncio.Event) -> None:
    async with slots.occupy_slot():
        await event.wait()


async def run_event_loop() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_larger_capacity_admits_queued_samples() -> None:
    slots, done = SampleSlots(2), asyncio.Event()
    holders = [asyncio.create_task(occupy_until(slots, done)) for _ in range(5)]
    await run_event_loop()
    assert slots.in_use == 2
    slots.resize(4)
    await run_event_loop()
    assert slots.in_use == 4
    done.set()
    await asyncio.gather(*holders)
    assert slots.in_use == 0


async def test_a_smaller_capacity_takes_effect_as_samples_finish() -> None:
    slots, done, last = SampleSlots(3), asyncio.Event(), asyncio.Event()
    first = [asyncio.create_task(occupy_until(slots, done)) for _ in range(3)]
    await run_event_loop()
    later = [asyncio.create_task(occupy_until(slots, last)) for _ in range(3)]
    slots.resize(1)
    done.set()
    await asyncio.gather(*first)
    await run_event_loop()
    assert slots.in_use == 1
    last.set()
    await asyncio.gather(*later)


@pytest.mark.parametrize("when", ["waiting", "granted"])
async def test_a_cancelled_sample_leaves_its_slot_to_the_next(when: str) -> None:
    slots, done = SampleSlots(1), asyncio.Event()
    running = asyncio.create_task(occupy_until(slots, done))
    await run_event_loop()
    waiting = asyncio.create_task(occupy_until(slots, asyncio.Event()))
    await run_event_loop()
    if when == "granted":
        done.set()
        await running
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    done.set()
    await asyncio.gather(running)
    async with asyncio.timeout(1.0), slots.occupy_slot():
        assert slots.in_use == 1


@pytest.mark.parametrize(
    ("capacity", "in_use", "load", "expected"),
    [
        (20, 20, EngineLoad(20, 0, 0, kv_use=0.5), 22),
        (20, 15, EngineLoad(15, 0, 0, kv_use=0.5), 20),  # not all slots are in use
        (20, 20, EngineLoad(20, 0, 0, kv_use=0.8), 20),
        (20, 20, EngineLoad(20, 0, 0, kv_use=0.95), 18),
        (20, 20, EngineLoad(15, 5, 0, kv_use=0.5, queued=5), 18),  # the engine queues
        (20, 20, EngineLoad(10, 10, 0, kv_use=0.5), 22),  # prompts of new groups are being read
        (1, 1, EngineLoad(1, 0, 0, kv_use=0.0), 2),
    ],
)
def test_concurrency_follows_the_engines_load(capacity: int, in_use: int, load: EngineLoad, expected: int) -> None:
    assert next_concurrency(capacity, in_use, load) == expected


def test_a_request_without_a_token_is_queued_only_after_a_while(tmp_path: Path) -> None:
    engine = VllmEngine(tmp_path, RolloutConfig(), precision="float32")
    engine._in_flight = {name: EngineRequest(name, 0, interruptible=True) for name in ("new", "old")}
    engine._in_flight["old"].submitted_s -= 10
    load = engine.load()
    assert (load.running, load.waiting, load.queued) == (0, 2, 1)


def test_a_paused_engine_keeps_its_capacity() -> None:
    engine, slots = FakeEngine(), SampleSlots(20)
    loads = [EngineLoad(0, 20, 100, queued=20), EngineLoad(0, 20, 100, queued=20), EngineLoad(4, 16, 101, queued=16)]
    engine.load = lambda: loads.pop(0)  # type: ignore[method-assign]
    controller = ConcurrencyController(cast(Any, engine), slots, min_capacity=1, max_capacity=20)
    capacities = []
    for _ in range(3):
        controller.adjust_capacity()
        capacities.append(slots.capacity)
    assert capacities == [18, 18, 16]


@pytest.mark.parametrize(
    ("capacity", "reserved", "wanted"), [(20, 0, 3), (20, 12, 1), (20, 11, 2), (20, 19, 1), (4, 7, 1)]
)
def test_groups_are_requested_for_all_free_slots(capacity: int, reserved: int, wanted: int) -> None:
    slots = SampleSlots(capacity)
    slots.reserve_samples(reserved)
    assert slots.groups_to_fill_free_slots(8) == wanted


async def test_finished_samples_make_room_for_another_group() -> None:
    slots = SampleSlots(4)
    slots.reserve_samples(8)
    slots.release_samples(5)
    assert (slots.reserved, slots.has_room) == (3, True)
