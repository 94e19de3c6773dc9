"""Tasks go in, tickets come out, and the staleness bound holds at every moment."""

from __future__ import annotations

import asyncio

import pytest

from async_grpo.errors import Fenced, RunEnded, StreamGap, WaitTimeout
from async_grpo.wire import ReleaseReason, encode
from buffer.capacity import MemoryQuota
from tests.support.buffer_cases import (
    LONG_S,
    NO_WAIT_S,
    Open,
    admit,
    finish,
    generate_and_train,
    group_of,
    policy,
    publish,
    released,
    take,
    tasks,
    train,
)


async def test_a_group_lives_from_waiting_to_trained(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=1), put=3)
    assert ((await buffer.stats()).waiting, (await buffer.stats()).active) == (3, 0)
    (ticket,) = await admit(buffer, 1)
    assert (await buffer.stats()).inflight == 1
    await buffer.insert_group(ticket, group_of(ticket))
    assert (await buffer.stats()).ready == 1
    batch = await take(buffer, 0)
    assert (await buffer.stats()).taken == 1
    await publish(buffer, 1)
    await buffer.release_batch(batch)
    stats = await buffer.stats()
    assert (stats.active, released(stats), stats.version, stats.balanced) == (0, {"trained": 1}, 1, True)


async def test_a_ticket_carries_its_task_its_version_and_its_lease(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=3, P=1), lease_s=12.5)
    await generate_and_train(buffer, 0)
    (ticket,) = await admit(buffer, 1, holder="server-7")
    assert (ticket.seq, ticket.task, ticket.version, ticket.epoch) == (1, tasks(1, 1)[0], 1, 1)
    assert (ticket.attempt, ticket.holder, ticket.lease_s, ticket.partial) == (1, "server-7", 12.5, None)


@pytest.mark.parametrize("staleness", [0, 2])
async def test_active_groups_never_exceed_the_window(open_buffer: Open, staleness: int) -> None:
    replay_policy = policy(S=staleness, P=2)
    buffer = await open_buffer(replay_policy)
    assert len(await admit(buffer, 100)) == replay_policy.window.capacity
    with pytest.raises(WaitTimeout, match="window"):
        await buffer.admit_groups(1, holder="server-0", timeout_s=NO_WAIT_S)
    assert (await buffer.stats()).active == replay_policy.window.capacity


async def test_a_slot_is_freed_by_release_and_not_by_take(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=2))
    await finish(buffer, *await admit(buffer, 2))
    batch = await take(buffer, 0)
    with pytest.raises(WaitTimeout):
        await buffer.admit_groups(1, holder="server-0", timeout_s=NO_WAIT_S)
    await publish(buffer, 1)
    await buffer.release_batch(batch)
    assert [ticket.seq for ticket in await admit(buffer, 100)] == [2, 3]


async def test_no_more_groups_are_admitted_than_the_run_can_train(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=5, P=2, steps=2))
    tickets = await admit(buffer, 100)
    assert len(tickets) == 4
    await buffer.discard_group(tickets[0], ReleaseReason.FILTERED)
    assert [ticket.seq for ticket in await admit(buffer, 100)] == [4]


@pytest.mark.parametrize(
    "reason", [ReleaseReason.FILTERED, ReleaseReason.UNVERIFIABLE, ReleaseReason.FAILED, ReleaseReason.EXPIRED]
)
async def test_a_discarded_group_frees_its_slot_and_is_counted_by_reason(
    open_buffer: Open, reason: ReleaseReason
) -> None:
    buffer = await open_buffer(policy(S=0, P=1))
    (ticket,) = await admit(buffer, 1)
    for _ in range(2):  # a repetition counts nothing
        await buffer.discard_group(ticket, reason)
    assert released(await buffer.stats()) == {reason.value: 1}
    assert [ticket.seq for ticket in await admit(buffer, 1)] == [1]


async def test_nothing_can_be_discarded_as_trained(open_buffer: Open) -> None:
    buffer = await open_buffer()
    (ticket,) = await admit(buffer, 1)
    with pytest.raises(ValueError, match="trained"):
        await buffer.discard_group(ticket, ReleaseReason.TRAINED)


async def test_two_feeders_may_race(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=9, P=2), put=0)
    assert await buffer.put_tasks(tasks(0, 3)) == 3
    await asyncio.gather(*(buffer.put_tasks(tasks(first, 5)) for first in (0, 1, 2, 3)))
    assert (await buffer.stats()).tasks_put == 8
    assert [ticket.task.index for ticket in await admit(buffer, 100)] == list(range(8))


async def test_a_gap_in_the_stream_is_refused(open_buffer: Open) -> None:
    buffer = await open_buffer(put=3)
    with pytest.raises(StreamGap, match="task 3"):
        await buffer.put_tasks(tasks(4, 1))
    with pytest.raises(ValueError, match="gap"):
        await buffer.put_tasks([*tasks(3, 1), *tasks(5, 1)])
    assert (await buffer.stats()).tasks_put == 3


async def test_tasks_that_were_finished_long_ago_are_not_put_again(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=2), put=4)
    await generate_and_train(buffer, 0)
    assert await buffer.put_tasks(tasks(0, 5)) == 5
    assert [ticket.seq for ticket in await admit(buffer, 100)] == [2, 3]


async def test_the_window_can_be_changed_during_the_run(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=2))
    assert len(await admit(buffer, 100)) == 2
    await buffer.update_policy(policy(S=1, P=2))
    assert len(await admit(buffer, 100)) == 2
    await buffer.update_policy(policy(S=0, P=2))
    with pytest.raises(WaitTimeout):
        await buffer.admit_groups(1, holder="server-0", timeout_s=NO_WAIT_S)
    assert (await buffer.stats()).max_staleness == 0


async def test_the_staleness_in_force_rules_admission_and_the_bound_rules_age(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=2, P=2, selector="freshest").with_staleness(0))
    first = await admit(buffer, 100)
    assert len(first) == 2
    await buffer.set_staleness(epoch=1, staleness=1)
    second = await admit(buffer, 100)
    await buffer.set_staleness(epoch=1, staleness=9)
    third = await admit(buffer, 100)
    assert (len(second), len(third)) == (2, 2)
    stats = await buffer.stats()
    assert (stats.staleness, stats.max_staleness, stats.capacity) == (2, 2, 6)
    await buffer.set_staleness(epoch=1, staleness=0)
    await finish(buffer, *first, *second, *third)
    for version in range(3):  # the window drains; groups of age 2 are above the effective S, not above the bound
        with pytest.raises(WaitTimeout):
            await buffer.admit_groups(1, holder="server-0", timeout_s=NO_WAIT_S)
        await train(buffer, version)
    assert len(await admit(buffer, 100)) == 2
    assert (await buffer.stats()).released == {**dict.fromkeys(ReleaseReason, 0), "trained": 6}


async def test_a_larger_staleness_wakes_servers_that_wait_for_a_slot(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=2).with_staleness(0))
    await admit(buffer, 2)
    waiting = asyncio.create_task(admit(buffer, 2))
    await asyncio.sleep(0.05)
    await buffer.set_staleness(epoch=1, staleness=1)
    async with asyncio.timeout(1):
        assert [ticket.seq for ticket in await waiting] == [2, 3]


async def test_a_smaller_staleness_leaves_room_for_a_batch(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=3, P=2, selector="windowed_fifo", selector_window=5))
    await buffer.set_staleness(epoch=1, staleness=0)
    assert (await buffer.stats()).staleness == 2


async def test_a_trainer_that_was_replaced_does_not_set_the_staleness(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=3, P=2))
    await buffer.rollback(0)
    with pytest.raises(Fenced):
        await buffer.set_staleness(epoch=1, staleness=0)
    assert (await buffer.stats()).staleness == 3


async def test_admission_waits_for_a_task(open_buffer: Open) -> None:
    buffer = await open_buffer(put=0)
    waiting = asyncio.create_task(admit(buffer, 1))
    await asyncio.sleep(0.05)
    await buffer.put_tasks(tasks(0, 1))
    async with asyncio.timeout(1):
        assert [ticket.seq for ticket in await waiting] == [0]


async def test_admission_waits_for_a_slot(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=2))
    await finish(buffer, *await admit(buffer, 2))
    waiting = [asyncio.create_task(admit(buffer, 1, f"server-{i}")) for i in range(2)]
    await asyncio.sleep(0.05)
    assert not any(one.done() for one in waiting)
    await train(buffer, 0)
    async with asyncio.timeout(1):  # one release wakes as many servers as there is room for
        assert sorted(tickets[0].seq for tickets in await asyncio.gather(*waiting)) == [2, 3]


async def test_the_end_of_the_run_ends_every_wait(open_buffer: Open) -> None:
    buffer = await open_buffer(put=0)
    waiting = [asyncio.create_task(admit(buffer, 1, f"server-{i}")) for i in range(3)]
    waiting.append(asyncio.create_task(take(buffer, 0)))  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    await buffer.end_run()
    async with asyncio.timeout(1):
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [RunEnded] * 4


async def test_work_in_flight_can_still_be_handed_in_after_the_end(open_buffer: Open) -> None:
    buffer = await open_buffer()
    first, second = await admit(buffer, 2)
    await buffer.end_run()
    await buffer.insert_group(first, group_of(first))
    await buffer.discard_group(second, ReleaseReason.FILTERED)
    assert ((await buffer.stats()).ready, (await buffer.stats()).ended) == (1, True)
    with pytest.raises(RunEnded):
        await buffer.admit_groups(1, holder="server-0", timeout_s=LONG_S)


async def test_a_quota_holds_new_groups_back_until_a_checkpoint_frees_finished_ones(open_buffer: Open) -> None:
    """Room for six groups, of which a batch of two is logged for every step until the checkpoint."""
    (ticket,) = await admit(await open_buffer(policy(S=3, P=2)), 1)
    size = len(encode(group_of(ticket)))
    buffer = await open_buffer(policy(S=3, P=2), quota=MemoryQuota(100 * size, 6 * size + 12, size + 1))
    for version in range(2):
        await generate_and_train(buffer, version)
    tickets = await admit(buffer, 100)
    stats = await buffer.stats()
    assert (len(tickets), stats.active, stats.capacity, stats.is_limited_by_quota) == (2, 2, 8, True)
    assert stats.stored_bytes == pytest.approx(4 * size, abs=8)
    with pytest.raises(WaitTimeout):
        await buffer.admit_groups(1, holder="server-0", timeout_s=NO_WAIT_S)
    waiting = asyncio.create_task(admit(buffer, 100))
    await asyncio.sleep(0.05)
    await buffer.commit_checkpoint(epoch=1, version=2)
    assert len(await waiting) == 4
    await buffer.discard_group(tickets[0], ReleaseReason.FILTERED)
    assert len(await admit(buffer, 100)) == 1, "the slot of a group that ended, and its memory"
    assert (await buffer.stats()).stored_bytes == 0


async def test_a_group_larger_than_expected_counts_with_its_real_size(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=3, P=1), quota=MemoryQuota(10_000, room_bytes=4_000, group_bytes=1_000))
    (ticket,) = await admit(buffer, 1)
    await buffer.insert_group(ticket, group_of(ticket, length=400))
    stored = (await buffer.stats()).stored_bytes
    assert 3_000 < stored < 4_000
    with pytest.raises(WaitTimeout):
        await buffer.admit_groups(1, holder="server-0", timeout_s=NO_WAIT_S)
