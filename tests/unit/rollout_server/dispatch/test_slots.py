"""How many samples run, and how the engine's load moves that number."""

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


async def hold(slots: SampleSlots, until: asyncio.Event) -> None:
    async with slots.running():
        await until.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_samples_beyond_the_capacity_wait_in_order_and_a_larger_one_lets_them_in() -> None:
    slots, done = SampleSlots(2), asyncio.Event()
    holders = [asyncio.create_task(hold(slots, done)) for _ in range(5)]
    await settle()
    assert slots.in_use == 2
    slots.resize(4)
    await settle()
    assert slots.in_use == 4
    done.set()
    await asyncio.gather(*holders)
    assert slots.in_use == 0


async def test_a_smaller_capacity_takes_effect_as_samples_finish() -> None:
    slots, done, last = SampleSlots(3), asyncio.Event(), asyncio.Event()
    first = [asyncio.create_task(hold(slots, done)) for _ in range(3)]
    await settle()
    later = [asyncio.create_task(hold(slots, last)) for _ in range(3)]
    slots.resize(1)
    done.set()
    await asyncio.gather(*first)
    await settle()
    assert slots.in_use == 1
    last.set()
    await asyncio.gather(*later)


@pytest.mark.parametrize("when", ["waiting", "granted"])
async def test_a_sample_that_is_cancelled_leaves_its_slot_to_the_next(when: str) -> None:
    slots, done = SampleSlots(1), asyncio.Event()
    running = asyncio.create_task(hold(slots, done))
    await settle()
    waiting = asyncio.create_task(hold(slots, asyncio.Event()))
    await settle()
    if when == "granted":
        done.set()
        await running
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    done.set()
    await asyncio.gather(running)
    async with asyncio.timeout(1.0), slots.running():
        assert slots.in_use == 1


@pytest.mark.parametrize(
    ("capacity", "in_use", "load", "following"),
    [
        (20, 20, EngineLoad(20, 0, 0, kv_use=0.5), 22),
        (20, 15, EngineLoad(15, 0, 0, kv_use=0.5), 20),  # there is nothing more to run
        (20, 20, EngineLoad(20, 0, 0, kv_use=0.8), 20),
        (20, 20, EngineLoad(20, 0, 0, kv_use=0.95), 18),
        (20, 20, EngineLoad(15, 5, 0, kv_use=0.5, queued=5), 18),  # the engine queues
        (20, 20, EngineLoad(10, 10, 0, kv_use=0.5), 22),  # prompts of new groups are being read
        (1, 1, EngineLoad(1, 0, 0, kv_use=0.0), 2),
    ],
)
def test_concurrency_follows_the_engines_load(capacity: int, in_use: int, load: EngineLoad, following: int) -> None:
    assert next_concurrency(capacity, in_use, load) == following


def test_a_request_without_a_token_is_queued_only_after_a_while(tmp_path: Path) -> None:
    engine = VllmEngine(tmp_path, RolloutConfig(), precision="float32")
    engine._in_flight = {name: EngineRequest(name, 0, interruptible=True) for name in ("new", "old")}
    engine._in_flight["old"].submitted_s -= 10
    load = engine.load()
    assert (load.running, load.waiting, load.queued) == (0, 2, 1)


def test_an_engine_that_is_paused_keeps_its_capacity() -> None:
    engine, slots = FakeEngine(), SampleSlots(20)
    loads = [EngineLoad(0, 20, 100, queued=20), EngineLoad(0, 20, 100, queued=20), EngineLoad(4, 16, 101, queued=16)]
    engine.load = lambda: loads.pop(0)  # type: ignore[method-assign]
    controller = ConcurrencyController(cast(Any, engine), slots, least=1, most=20)
    capacities = []
    for _ in range(3):
        controller.adjust()
        capacities.append(slots.capacity)
    assert capacities == [18, 18, 16]


@pytest.mark.parametrize(
    ("capacity", "committed", "wanted"), [(20, 0, 3), (20, 12, 1), (20, 11, 2), (20, 19, 1), (4, 7, 1)]
)
def test_as_many_groups_are_wanted_as_fill_the_slots(capacity: int, committed: int, wanted: int) -> None:
    slots = SampleSlots(capacity)
    slots.commit(committed)
    assert slots.groups_wanted(8) == wanted


async def test_finished_samples_make_room_for_the_next_group() -> None:
    slots = SampleSlots(4)
    slots.commit(8)
    slots.finish(5)
    assert (slots.committed, slots.has_room) == (3, True)
