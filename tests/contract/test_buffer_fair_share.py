"""While there is less room than servers could hold, each server that waits gets its share of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from async_grpo.errors import WaitTimeout
from async_grpo.wire import Ticket
from buffer import ReplayBuffer
from buffer.fair_share import FAIR_WAIT_S
from tests.support.buffer_cases import LONG_S, NO_WAIT_S, Open, admit, finish, policy, take, tasks, train


async def ask(buffer: ReplayBuffer, server: str, free: int, slots: int, timeout_s: float = LONG_S) -> list[Ticket]:
    return await buffer.admit_groups(free, holder=server, timeout_s=timeout_s, slots=slots)


async def refuse(buffer: ReplayBuffer, server: str, free: int, slots: int) -> None:
    """The server asks and gets nothing; the buffer knows from then on that it waits."""
    with pytest.raises(WaitTimeout):
        await ask(buffer, server, free, slots, NO_WAIT_S)


async def test_two_servers_that_wait_get_half_of_the_room_each(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=8), put=0)
    await refuse(buffer, "server-0", 16, 16)
    await refuse(buffer, "server-1", 16, 16)
    await buffer.put_tasks(tasks(0, 8))
    assert [ticket.seq for ticket in await ask(buffer, "server-1", 16, 16)] == [0, 1, 2, 3]
    assert [ticket.seq for ticket in await ask(buffer, "server-0", 16, 16)] == [4, 5, 6, 7]


async def test_a_server_that_joins_gets_all_until_it_holds_as_much_as_the_others(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=8))
    held = await ask(buffer, "server-0", 16, 16)
    assert len(held) == 16
    await finish(buffer, *held[:8])
    await refuse(buffer, "server-0", 8, 16)
    await refuse(buffer, "server-1", 16, 16)
    await train(buffer, 0)
    await refuse(buffer, "server-0", 8, 16)
    assert len(await ask(buffer, "server-1", 16, 16)) == 8


async def test_servers_with_more_slots_hold_more(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=10), put=0)
    await refuse(buffer, "small", 4, 4)
    await refuse(buffer, "large", 16, 16)
    await buffer.put_tasks(tasks(0, 10))
    assert [len(await ask(buffer, "small", 4, 4)), len(await ask(buffer, "large", 16, 16))] == [2, 8]


async def test_a_server_with_few_free_slots_leaves_the_rest_to_the_others(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=2, P=8), put=15)
    assert len(await ask(buffer, "busy", 16, 16)) == 15
    await refuse(buffer, "busy", 1, 16)
    await refuse(buffer, "free", 16, 16)
    await buffer.put_tasks(tasks(15, 9))
    assert len(await ask(buffer, "free", 16, 16)) == 9


async def test_groups_that_end_while_their_server_waits_count_as_free_slots(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=8), put=8)
    held = await ask(buffer, "server-0", 16, 16)
    await refuse(buffer, "server-0", 8, 16)
    await refuse(buffer, "server-1", 16, 16)
    await finish(buffer, *held)
    await train(buffer, 0)
    await buffer.put_tasks(tasks(8, 8))
    assert len(await ask(buffer, "server-1", 16, 16)) == 4


async def test_servers_whose_requests_are_old_do_not_wait_for_each_other(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=8))
    held = [*await ask(buffer, "server-0", 8, 16), *await ask(buffer, "server-1", 8, 16)]
    await refuse(buffer, "server-0", 8, 16)
    await refuse(buffer, "server-1", 8, 16)
    await finish(buffer, *held)
    await train(buffer, 0)
    await train(buffer, 1)
    assert len(await ask(buffer, "server-0", 8, 16, NO_WAIT_S)) == 8
    assert len(await ask(buffer, "server-1", 8, 16, NO_WAIT_S)) == 8


async def test_room_is_not_kept_for_a_server_that_has_stopped_waiting(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=2, P=8), put=12)
    assert len(await ask(buffer, "busy", 16, 16)) == 12
    await refuse(buffer, "dead", 16, 16)
    await buffer.put_tasks(tasks(12, 4))
    await refuse(buffer, "busy", 4, 16)
    began_s = asyncio.get_running_loop().time()
    assert len(await ask(buffer, "busy", 4, 16)) == 4
    assert asyncio.get_running_loop().time() - began_s < 10 * FAIR_WAIT_S


async def test_groups_that_lost_their_holder_still_come_first_lowest_first(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=4))
    tickets = await admit(buffer, 6, "dead")
    for ticket in (tickets[4], tickets[1]):
        await buffer.give_back(ticket)
    first = await ask(buffer, "server-0", 2, 8)
    second = await ask(buffer, "server-1", 2, 8)
    assert [ticket.seq for ticket in [*first, *second]] == [1, 4, 6, 7]


@asynccontextmanager
async def working_servers(buffer: ReplayBuffer, names: list[str], slots: int) -> AsyncIterator[Counter[str]]:
    """Servers that hold groups for a moment and finish them; yields how many groups each was granted."""
    granted: Counter[str] = Counter()

    async def make(ticket: Ticket) -> None:
        await asyncio.sleep(0.02)
        await finish(buffer, ticket)

    async def serve(name: str) -> None:
        held: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as groups:
            while True:
                held = {group for group in held if not group.done()}
                if len(held) == slots:
                    await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED)
                    continue
                try:
                    tickets = await ask(buffer, name, slots - len(held), slots, 0.5)
                except WaitTimeout:
                    continue
                granted[name] += len(tickets)
                held |= {groups.create_task(make(ticket)) for ticket in tickets}

    serving = [asyncio.create_task(serve(name)) for name in names]
    try:
        yield granted
    finally:
        for server in serving:
            server.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


@pytest.mark.parametrize("servers", [2, 4])
async def test_servers_at_work_in_a_small_window_get_equal_parts(open_buffer: Open, servers: int) -> None:
    buffer = await open_buffer(policy(S=0, P=8, steps=40), put=320)
    async with working_servers(buffer, [f"server-{number}" for number in range(servers)], 16) as granted:
        for version in range(20):
            batch = await take(buffer, version)
            await buffer.publish_version(epoch=1, version=version + 1)
            await buffer.release_batch(batch)
    expected = 160 / servers
    assert all(abs(granted[f"server-{number}"] - expected) <= 0.35 * expected for number in range(servers)), granted
