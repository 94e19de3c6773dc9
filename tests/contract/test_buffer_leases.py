"""A ticket belongs to one holder at a time, and what a holder leaves behind is not lost."""

from __future__ import annotations

import asyncio

import pytest

from async_grpo.errors import LeaseLost, WaitTimeout
from async_grpo.wire import ReleaseReason
from buffer.holders import holder_name
from tests.support.buffer_cases import (
    NO_WAIT_S,
    Open,
    admit,
    finish,
    group_of,
    partial_of,
    policy,
    released,
    seqs,
    take,
    train,
)

SHORT_S = 0.15


async def test_an_expired_lease_goes_to_the_next_holder_with_the_partial(open_buffer: Open) -> None:
    buffer = await open_buffer(lease_s=SHORT_S)
    (first,) = await admit(buffer, 1, "server-0")
    await buffer.save_partial(first, partial_of(first))
    await asyncio.sleep(1.5 * SHORT_S)
    (second,) = await admit(buffer, 1, "server-1")
    assert (second.seq, second.attempt, second.holder) == (first.seq, 2, "server-1")
    assert second.partial == partial_of(first)
    assert (await buffer.stats()).admitted == 1


async def test_expired_leases_come_before_new_groups_lowest_first(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=2))
    tickets = await admit(buffer, 3)
    await buffer.give_back(tickets[2])
    await buffer.give_back(tickets[0])
    assert [(ticket.seq, ticket.attempt) for ticket in await admit(buffer, 3)] == [(0, 2), (2, 2), (3, 1)]


@pytest.mark.parametrize(("stored", "version"), [(True, 0), (False, 1)])
async def test_a_group_starts_again_only_without_a_partial(open_buffer: Open, stored: bool, version: int) -> None:
    buffer = await open_buffer(policy(S=1, P=1))
    tickets = await admit(buffer, 2)
    if stored:
        await buffer.save_partial(tickets[1], partial_of(tickets[1]))
    await finish(buffer, tickets[0])
    await train(buffer, 0)
    await buffer.give_back(tickets[1])
    (again,) = await admit(buffer, 1)
    assert (again.seq, again.version, again.partial is not None) == (1, version, stored)


async def test_a_heartbeat_keeps_a_lease_alive(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=1), lease_s=SHORT_S)
    (ticket,) = await admit(buffer, 1)
    for _ in range(4):
        await asyncio.sleep(SHORT_S / 2)
        assert await buffer.renew_leases([ticket]) == []
    with pytest.raises(WaitTimeout):
        await buffer.admit_groups(1, holder="server-1", timeout_s=NO_WAIT_S)


async def test_a_heartbeat_names_the_groups_that_are_lost(open_buffer: Open) -> None:
    buffer = await open_buffer()
    kept, given_back, done = await admit(buffer, 3)
    await buffer.give_back(given_back)
    await finish(buffer, done)
    assert await buffer.renew_leases([kept, given_back, done]) == [given_back.seq, done.seq]


async def test_a_late_insert_of_an_old_attempt_is_refused(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=1))
    (old,) = await admit(buffer, 1)
    await buffer.give_back(old)
    (new,) = await admit(buffer, 1)
    for late in (
        buffer.insert_group(old, group_of(old, version=7)),
        buffer.discard_group(old, ReleaseReason.FILTERED),
        buffer.save_partial(old, partial_of(old)),
    ):
        with pytest.raises(LeaseLost, match="attempt 1 of group 0"):
            await late
    await buffer.insert_group(new, group_of(new))
    with pytest.raises(LeaseLost):
        await buffer.insert_group(old, group_of(old, version=7))
    assert (await take(buffer, 0)).groups == [group_of(new)]


async def test_a_late_call_of_an_old_attempt_does_not_replace_the_partial(open_buffer: Open) -> None:
    buffer = await open_buffer()
    (old,) = await admit(buffer, 1)
    await buffer.save_partial(old, partial_of(old, length=2))
    await buffer.give_back(old)
    (new,) = await admit(buffer, 1)
    await buffer.save_partial(new, partial_of(new, length=5))
    with pytest.raises(LeaseLost):
        await buffer.save_partial(old, partial_of(old, length=3))
    await buffer.give_back(new)
    assert (await admit(buffer, 1))[0].partial == partial_of(new, length=5)


async def test_giving_back_twice_or_too_late_changes_nothing(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=1))
    (old,) = await admit(buffer, 1)
    await buffer.give_back(old)
    await buffer.give_back(old)
    (new,) = await admit(buffer, 1)
    await buffer.give_back(old)
    assert await buffer.renew_leases([new]) == []


async def test_an_expired_lease_that_nobody_took_over_still_counts(open_buffer: Open) -> None:
    buffer = await open_buffer(lease_s=SHORT_S)
    (ticket,) = await admit(buffer, 1)
    await asyncio.sleep(1.5 * SHORT_S)
    await finish(buffer, ticket)
    assert (await buffer.stats()).ready == 1


async def test_a_group_whose_holders_keep_dying_is_failed_and_frees_its_slot(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=1), lease_s=SHORT_S, max_attempts=2)
    assert [(await admit(buffer, 1))[0].seq for _ in range(3)] == [0, 0, 1]
    stats = await buffer.stats()
    assert (released(stats), stats.active, stats.balanced) == ({"failed": 1}, 1, True)


async def test_giving_back_uses_up_no_attempt(open_buffer: Open) -> None:
    buffer = await open_buffer(max_attempts=2)
    for attempt in range(1, 6):
        (ticket,) = await admit(buffer, 1)
        assert (ticket.seq, ticket.attempt) == (0, attempt)
        await buffer.give_back(ticket)


async def test_a_group_that_keeps_killing_engines_is_failed_after_max_attempts(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=1), max_attempts=3)
    for attempt in range(1, 4):
        (ticket,) = await admit(buffer, 1)
        assert (ticket.seq, ticket.attempt, ticket.expired_leases) == (0, attempt, attempt - 1)
        await buffer.give_back(ticket, count_as_expired=True)
        await buffer.give_back(ticket, count_as_expired=True)  # its reply was lost: counted once
    (other,) = await admit(buffer, 1)
    stats = await buffer.stats()
    assert (other.seq, other.expired_leases) == (1, 0)
    assert (released(stats), stats.active, stats.balanced) == ({"failed": 1}, 1, True)


async def test_engine_deaths_and_expired_leases_add_up(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=1), lease_s=SHORT_S, max_attempts=2)
    (ticket,) = await admit(buffer, 1)
    await buffer.give_back(ticket, count_as_expired=True)
    assert [ticket.seq for ticket in await admit(buffer, 1)] == [0]
    await asyncio.sleep(1.5 * SHORT_S)
    assert [ticket.seq for ticket in await admit(buffer, 1)] == [1]


async def test_a_failed_group_does_not_hold_up_the_batch(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=1), lease_s=SHORT_S, max_attempts=1)
    _dying, living = await admit(buffer, 2)
    await finish(buffer, living)
    assert seqs(await take(buffer, 0)) == [living.seq]


async def test_admission_waits_for_a_lease_to_expire(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=1), lease_s=SHORT_S)
    await admit(buffer, 1)
    async with asyncio.timeout(1):
        (ticket,) = await admit(buffer, 1)
    assert (ticket.seq, ticket.attempt) == (0, 2)


async def test_admission_is_woken_by_a_ticket_that_is_given_back(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=1))
    (ticket,) = await admit(buffer, 1)
    waiting = asyncio.create_task(admit(buffer, 1))
    await asyncio.sleep(0.05)
    await buffer.give_back(ticket)
    async with asyncio.timeout(1):
        assert (await waiting)[0].attempt == 2


async def test_a_repeated_insert_is_harmless_at_every_stage(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=1))
    (ticket,) = await admit(buffer, 1)
    await finish(buffer, ticket, ticket)
    batch = await train(buffer, 0)
    await finish(buffer, ticket)
    await buffer.commit_checkpoint(epoch=1, version=1)
    await finish(buffer, ticket)
    stats = await buffer.stats()
    assert (seqs(batch), released(stats), stats.active, stats.kept) == ([0], {"trained": 1}, 0, 0)


async def test_a_group_ends_in_one_way_only(open_buffer: Open) -> None:
    buffer = await open_buffer()
    inserted, discarded = await admit(buffer, 2)
    await finish(buffer, inserted)
    await buffer.discard_group(discarded, ReleaseReason.FILTERED)
    with pytest.raises(LeaseLost):
        await buffer.discard_group(inserted, ReleaseReason.FILTERED)
    with pytest.raises(LeaseLost):
        await finish(buffer, discarded)


async def test_an_admission_that_is_cancelled_keeps_no_ticket_and_costs_no_attempt(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=4), max_attempts=1)
    for turns in range(40):  # one more turn of the event loop each time: every place where it can be cancelled
        asking = asyncio.create_task(admit(buffer, 4))
        for _ in range(turns):
            await asyncio.sleep(0)
        if asking.done():
            for ticket in asking.result():
                await buffer.give_back(ticket)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        granted = await admit(buffer, 4, "server-1")
        assert [ticket.seq for ticket in granted] == [0, 1, 2, 3]
        for ticket in granted:
            await buffer.give_back(ticket)
    assert (await buffer.stats()).released_total == 0


async def test_the_leases_of_a_dead_server_expire_at_once_and_those_of_its_next_life_stay(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=2, P=2), lease_s=3600.0)
    (old,) = await admit(buffer, 1, holder_name("server-0", 10))
    await buffer.save_partial(old, partial_of(old))
    (other,) = await admit(buffer, 1, holder_name("server-00", 10))
    (new,) = await admit(buffer, 1, holder_name("server-0", 11))
    (nameless,) = await admit(buffer, 1, "server-0")
    await buffer.expire_leases("server-0", life=10)
    await buffer.expire_leases("server-0", life=10)
    again, *_ = await admit(buffer, 2, holder_name("server-0", 12))
    assert (again.seq, again.attempt, again.partial) == (old.seq, 2, partial_of(old))
    assert await buffer.renew_leases([old, other, new, nameless]) == [old.seq]


async def test_a_waiting_server_continues_the_groups_of_a_dead_one(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=2), lease_s=3600.0)
    lost = await admit(buffer, 2, holder_name("server-0", 10))
    waiting = asyncio.create_task(admit(buffer, 2, holder_name("server-1", 10)))
    await asyncio.sleep(0.05)
    await buffer.expire_leases("server-0", life=10)
    assert [ticket.seq for ticket in await waiting] == [ticket.seq for ticket in lost]


async def test_a_group_that_kills_its_server_every_time_is_given_up(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=1), lease_s=3600.0, max_attempts=3)
    for life in (1, 2, 3):
        (ticket,) = await admit(buffer, 1, holder_name("server-0", life))
        assert (ticket.seq, ticket.attempt) == (0, life)
        await buffer.expire_leases("server-0", life=life)
    (ticket,) = await admit(buffer, 1, holder_name("server-0", 4))
    assert (ticket.seq, released(await buffer.stats())) == (1, {"failed": 1})


async def test_a_server_that_was_thought_dead_still_delivers_until_another_has_its_group(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=2))
    finished, taken_over = await admit(buffer, 2, holder_name("server-0", 10))
    await buffer.expire_leases("server-0", life=10)
    await finish(buffer, finished)
    await admit(buffer, 1, "server-1")
    with pytest.raises(LeaseLost):
        await finish(buffer, taken_over)
    assert (await buffer.stats()).ready == 1
