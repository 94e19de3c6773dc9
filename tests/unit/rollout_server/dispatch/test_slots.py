"""How many samples run, and how the engine's load moves that number."""

from __future__ import annotations

import asyncio

import pytest

from rollout_server.dispatch.concurrency import SampleSlots, next_concurrency
from rollout_server.engines.base import EngineLoad


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
        (20, 20, EngineLoad(15, 5, 0, kv_use=0.5), 18),  # the engine queues
        (1, 1, EngineLoad(1, 0, 0, kv_use=0.0), 2),
    ],
)
def test_concurrency_follows_the_engines_load(capacity: int, in_use: int, load: EngineLoad, following: int) -> None:
    assert next_concurrency(capacity, in_use, load) == following


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
