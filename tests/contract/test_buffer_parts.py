"""A step may be taken in parts, as its groups arrive; what was taken stays taken."""

from __future__ import annotations

import asyncio

import pytest

from async_grpo.errors import Fenced, RunEnded, WaitTimeout
from async_grpo.staleness import ORDERED_SELECTORS, SELECTORS, Selector
from async_grpo.wire import Batch
from buffer import ReplayBuffer
from tests.support.buffer_cases import (
    LONG_S,
    NO_WAIT_S,
    Open,
    admit,
    finish,
    group_of,
    policy,
    publish,
    released,
    seqs,
    take,
)


async def take_part(buffer: ReplayBuffer, version: int, have: int, epoch: int = 1, timeout_s: float = LONG_S) -> Batch:
    return await buffer.take_batch_part(epoch=epoch, version=version, have=have, timeout_s=timeout_s)


async def test_a_part_has_only_groups_that_the_selector_allows(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=4))
    tickets = await admit(buffer, 6)
    await finish(buffer, tickets[0], tickets[1], tickets[3])
    first = await take_part(buffer, 0, 0)
    assert (seqs(first), first.missing) == ([0, 1], 2)
    with pytest.raises(WaitTimeout, match="rollout servers"):
        await take_part(buffer, 0, 2, timeout_s=NO_WAIT_S)  # 2 is in flight, and fifo waits for it
    await finish(buffer, tickets[2], tickets[4])
    second = await take_part(buffer, 0, 2)
    assert (seqs(second), second.missing) == ([2, 3], 0)
    stats = await buffer.stats()
    assert (stats.taken, stats.ready, stats.used) == (4, 1, 4)


async def test_one_group_wakes_a_trainer_that_waits_for_a_part(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=3))
    tickets = await admit(buffer, 3)
    waiting = asyncio.create_task(take_part(buffer, 0, 0))
    await asyncio.sleep(0.05)
    await finish(buffer, tickets[0])
    assert seqs(await waiting) == [0]


async def test_a_window_lets_a_part_overtake_groups_in_flight(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=3, selector="windowed_fifo", selector_window=2))
    tickets = await admit(buffer, 4)
    await finish(buffer, *tickets[1:])
    part = await take_part(buffer, 0, 0)
    assert (seqs(part), part.missing) == ([1], 2)
    await finish(buffer, tickets[0])
    assert seqs(await take_part(buffer, 0, 1)) == [0, 2]


@pytest.mark.parametrize("selector", [name for name in SELECTORS if name not in ORDERED_SELECTORS])
async def test_selectors_of_whole_batches_deliver_no_parts(open_buffer: Open, selector: Selector) -> None:
    buffer = await open_buffer(policy(S=1, P=2, selector=selector))
    tickets = await admit(buffer, 3)
    await finish(buffer, tickets[0])
    with pytest.raises(WaitTimeout):
        await take_part(buffer, 0, 0, timeout_s=NO_WAIT_S)
    await finish(buffer, tickets[1])
    part = await take_part(buffer, 0, 0)
    assert (seqs(part), part.missing) == ([0, 1], 0)


async def test_a_trainer_that_takes_over_is_given_the_same_parts_first(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=3, selector="windowed_fifo", selector_window=2))
    tickets = await admit(buffer, 4)
    await finish(buffer, tickets[1])
    await take_part(buffer, 0, 0)
    await finish(buffer, tickets[0])
    epoch = (await buffer.rollback(0)).epoch
    again = await take_part(buffer, 0, 0, epoch)
    assert (seqs(again), again.replayed, again.missing) == ([1], True, 2)
    with pytest.raises(Fenced):
        await take_part(buffer, 0, 1)
    assert seqs(await take_part(buffer, 0, 1, epoch)) == [0]
    await finish(buffer, tickets[2])
    whole = await take(buffer, 0, epoch)
    assert whole.groups == [group_of(tickets[seq]) for seq in (1, 0, 2)]
    await publish(buffer, 1, epoch)
    await buffer.release_batch(whole)
    assert released(await buffer.stats()) == {"trained": 3}


async def test_a_lost_reply_costs_nothing(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=2))
    tickets = await admit(buffer, 2)
    await finish(buffer, tickets[0])
    assert (await take_part(buffer, 0, 0)) == (await take_part(buffer, 0, 0))
    assert (await buffer.stats()).used == 1


async def test_a_step_keeps_its_size_when_the_run_is_retuned(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=2))
    tickets = await admit(buffer, 4)
    await finish(buffer, tickets[0])
    await take_part(buffer, 0, 0)
    await buffer.update_policy(policy(S=1, P=4))
    await finish(buffer, *tickets[1:])
    part = await take_part(buffer, 0, 1)
    assert (seqs(part), part.missing) == ([1], 0)


async def test_groups_that_are_too_old_end_before_a_part_is_taken(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=2, on_stale="drop"))
    tickets = await admit(buffer, 3)
    await publish(buffer, 2)
    await buffer.insert_group(tickets[1], group_of(tickets[1], version=2))
    await finish(buffer, tickets[0])
    part = await take_part(buffer, 2, 0)
    assert (seqs(part), released(await buffer.stats())) == ([1], {"expired": 1, "stale": 1})


async def test_a_step_that_was_begun_is_delivered_after_the_end(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=2))
    await finish(buffer, (await admit(buffer, 2))[0])
    await take_part(buffer, 0, 0)
    await buffer.end_run()
    assert seqs(await take_part(buffer, 0, 0)) == [0]
    with pytest.raises(RunEnded):
        await take_part(buffer, 0, 1)
