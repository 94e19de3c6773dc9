"""Groups are delivered whole batches at a time, in ticket order, never too old."""

from __future__ import annotations

import asyncio

import pytest

from async_grpo.errors import WaitTimeout
from async_grpo.wire import ReleaseReason
from tests.support.buffer_cases import (
    NO_WAIT_S,
    Open,
    admit,
    finish,
    generate_and_train,
    group_of,
    policy,
    publish,
    released,
    seqs,
    take,
    train,
)


async def test_batches_follow_the_tickets_and_not_completion(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=2))
    await finish(buffer, *reversed(await admit(buffer, 4)))
    assert seqs(await train(buffer, 0)) == [0, 1]
    assert seqs(await train(buffer, 1)) == [2, 3]


async def test_a_group_in_flight_holds_up_those_behind_it(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=2, P=2))
    slow, *fast = await admit(buffer, 6)
    await finish(buffer, *fast)
    with pytest.raises(WaitTimeout, match="rollout servers"):
        await take(buffer, 0, timeout_s=NO_WAIT_S)
    await finish(buffer, slow)
    assert seqs(await take(buffer, 0)) == [0, 1]


async def test_a_batch_is_delivered_whole_or_not_at_all(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=3))
    tickets = await admit(buffer, 3)
    await finish(buffer, *tickets[:2])
    with pytest.raises(WaitTimeout):
        await take(buffer, 0, timeout_s=NO_WAIT_S)
    assert ((await buffer.stats()).ready, (await buffer.stats()).taken) == (2, 0)


async def test_the_groups_come_out_as_they_went_in(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=2))
    tickets = await admit(buffer, 2)
    await finish(buffer, *tickets)
    batch = await take(buffer, 0)
    assert (batch.groups, batch.epoch, batch.version, batch.replayed) == ([group_of(t) for t in tickets], 1, 0, False)


async def test_a_repeated_take_delivers_the_same_batch(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=2))
    await finish(buffer, *await admit(buffer, 4))
    assert await take(buffer, 0) == await take(buffer, 0)
    assert (await buffer.stats()).taken == 2


async def test_a_repeated_release_counts_once(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=2))
    batch = await generate_and_train(buffer, 0)
    await buffer.release_batch(batch)
    assert released(await buffer.stats()) == {"trained": 2}


@pytest.mark.parametrize("staleness", [0, 2])
async def test_trained_ages_stay_within_the_bound(open_buffer: Open, staleness: int) -> None:
    """With servers that fill the window greedily with the policy of their tickets, the oldest allowed."""
    buffer = await open_buffer(policy(S=staleness, P=2, steps=8))
    ages = []
    for version in range(8):
        while (stats := await buffer.stats()).active < 2 * (staleness + 1) and stats.admitted < stats.horizon:
            await finish(buffer, *await admit(buffer, 100))
        batch = await train(buffer, version)
        ages += [version - group.oldest_version for group in batch.groups]
    assert max(ages) == staleness
    assert released(await buffer.stats()) == {"trained": 16}


async def test_a_group_that_is_too_old_is_released_as_stale_and_the_next_one_considered(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=1))
    await generate_and_train(buffer, 0)
    await generate_and_train(buffer, 1)
    old, young = await admit(buffer, 2)
    await buffer.insert_group(old, group_of(old, version=0))
    await buffer.insert_group(young, group_of(young, version=1))
    assert seqs(await take(buffer, 2)) == [young.seq]
    stats = await buffer.stats()
    assert (released(stats), stats.balanced, stats.kept) == ({"trained": 2, "stale": 1}, True, 3)
    await finish(buffer, old)  # a repetition after a lost reply


async def test_a_trainer_that_waits_is_woken_by_the_last_group(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=2))
    first, second = await admit(buffer, 2)
    waiting = asyncio.create_task(take(buffer, 0))
    await finish(buffer, first)
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await finish(buffer, second)
    async with asyncio.timeout(1):
        assert seqs(await waiting) == [0, 1]


async def test_a_trainer_that_waits_is_woken_when_the_group_before_is_discarded(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=1))
    first, second = await admit(buffer, 2)
    await finish(buffer, second)
    waiting = asyncio.create_task(take(buffer, 0))
    await asyncio.sleep(0.05)
    await buffer.discard_group(first, ReleaseReason.FILTERED)
    async with asyncio.timeout(1):
        assert seqs(await waiting) == [1]


async def test_the_size_of_a_batch_can_be_retuned(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=2))
    await finish(buffer, *await admit(buffer, 4))
    waiting = asyncio.create_task(train(buffer, 0))
    await waiting
    await buffer.update_policy(policy(S=1, P=1))
    assert seqs(await take(buffer, 1)) == [2]


async def test_the_published_version_never_goes_back(open_buffer: Open) -> None:
    buffer = await open_buffer()
    await publish(buffer, 5)
    await publish(buffer, 3)
    assert (await buffer.stats()).version == 5
