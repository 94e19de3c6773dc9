"""Selectors, what is too old, admission by ratio, groups that are trained more than once."""

from __future__ import annotations

import pytest

from async_grpo.errors import WaitTimeout
from async_grpo.staleness import ORDERED_SELECTORS, SELECTORS, OnStale, RateLimit, Selector
from async_grpo.wire import Batch, ReleaseReason
from buffer import ReplayBuffer
from tests.support.buffer_cases import (
    NO_WAIT_S,
    Open,
    admit,
    finish,
    group_of,
    partial_of,
    policy,
    publish,
    released,
    seqs,
    take,
    train,
)


async def nothing_to_take(buffer: ReplayBuffer, version: int) -> None:
    with pytest.raises(WaitTimeout, match="groups"):
        await take(buffer, version, timeout_s=NO_WAIT_S)


async def nothing_to_admit(buffer: ReplayBuffer) -> None:
    with pytest.raises(WaitTimeout, match="window"):
        await buffer.admit_groups(1, holder="server-0", timeout_s=NO_WAIT_S)


async def settle(buffer: ReplayBuffer, batch: Batch) -> None:
    await publish(buffer, batch.version + 1)
    await buffer.release_batch(batch)


async def test_windowed_fifo_overtakes_within_its_window_only(open_buffer: Open) -> None:
    replay_policy = policy(S=3, P=2, selector="windowed_fifo", selector_window=3)
    buffer = await open_buffer(replay_policy)
    tickets = await admit(buffer, 6)
    await finish(buffer, tickets[1], tickets[3])
    await nothing_to_take(buffer, 0)  # group 3 would overtake group 0 as the third
    await finish(buffer, tickets[2])
    assert seqs(await train(buffer, 0)) == [1, 2]
    await nothing_to_take(buffer, 1)
    await finish(buffer, tickets[0])
    assert seqs(await train(buffer, 1)) == [0, 3]


async def test_freshest_takes_the_newest_and_ends_groups_that_are_too_old(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=1, selector="freshest"))
    first, second = await admit(buffer, 2)
    await finish(buffer, first, second)
    assert seqs(await train(buffer, 0)) == [1]
    (third,) = await admit(buffer, 1)
    await finish(buffer, third)
    assert seqs(await train(buffer, 1)) == [2]
    await nothing_to_take(buffer, 2)  # group 0 has age 2
    stats = await buffer.stats()
    assert (released(stats), stats.kept) == ({"trained": 2, "stale": 1}, 2)


async def test_exact_age_waits_for_the_whole_window_and_then_every_group_has_age_s(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=2, P=2, steps=5, selector="exact_age"))
    tickets = await admit(buffer, 6)
    await finish(buffer, *tickets[:5])
    await nothing_to_take(buffer, 0)  # group 5 would finish under version 1
    await buffer.discard_group(tickets[5], ReleaseReason.FILTERED)
    await finish(buffer, *await admit(buffer, 1))  # and so would the one that takes its place
    ages = []
    for version in range(5):
        batch = await train(buffer, version)
        ages += [version - group.oldest_version for group in batch.groups]
        if version < 2:
            late, *others = await admit(buffer, 2)
            await finish(buffer, *others)
            await nothing_to_take(buffer, version + 1)
            await finish(buffer, late)
    assert ages == [0, 0, 1, 1, 2, 2, 2, 2, 2, 2]  # the last two steps train what is left before the horizon


async def test_ended_groups_are_counted_by_their_longest_completion(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=2))
    short, long = await admit(buffer, 2)
    await buffer.insert_group(short, group_of(short, length=4))
    await buffer.insert_group(long, group_of(long, length=100))
    await train(buffer, 0)
    await buffer.discard_group((await admit(buffer, 1))[0], ReleaseReason.FILTERED)
    stats = await buffer.stats()
    assert stats.released_by_length == {"trained:4": 1, "trained:128": 1}


async def test_a_group_in_flight_that_is_too_old_to_finish_expires(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=1, selector="freshest"))
    slow, quick = await admit(buffer, 2)
    await buffer.save_partial(slow, partial_of(slow, length=9))
    for version in range(2):
        await finish(buffer, quick)
        await train(buffer, version)
        (quick,) = await admit(buffer, 1)
    await finish(buffer, quick)
    await train(buffer, 2)
    stats = await buffer.stats()
    assert released(stats) == {"trained": 3, "expired": 1}
    assert stats.released_by_length["expired:16"] == 1
    assert await buffer.renew_leases([slow]) == [slow.seq]


@pytest.mark.parametrize(("on_stale", "resumed"), [("drop", False), ("mask", True), ("wait", True)])
async def test_a_partial_that_is_too_old_is_resumed_unless_the_policy_drops_it(
    open_buffer: Open, on_stale: OnStale, resumed: bool
) -> None:
    buffer = await open_buffer(policy(S=1, P=1, selector="windowed_fifo", selector_window=2, on_stale=on_stale))
    slow, quick = await admit(buffer, 2)
    await buffer.save_partial(slow, partial_of(slow))
    await finish(buffer, quick)
    await train(buffer, 0)
    await publish(buffer, 2)
    await buffer.give_back(slow)
    (ticket,) = await admit(buffer, 1)
    assert (ticket.seq, ticket.partial is not None) == ((0, True) if resumed else (2, False))
    assert released(await buffer.stats()) == ({"trained": 1} | ({} if resumed else {"expired": 1}))


async def test_masked_tokens_stay_as_context_until_a_group_has_no_younger_one(open_buffer: Open) -> None:
    replay_policy = policy(S=1, P=1, selector="freshest", on_stale="mask")
    buffer = await open_buffer(replay_policy)
    await publish(buffer, 4)
    mixed, old = await admit(buffer, 2)
    await buffer.insert_group(mixed, group_of(mixed, version=1, newest=4))
    await buffer.insert_group(old, group_of(old, version=1, newest=2))
    batch = await take(buffer, 4)
    assert (seqs(batch), batch.mask_below) == ([0], 3)
    assert (await take(buffer, 4)).mask_below == 3
    assert released(await buffer.stats()) == {"stale": 1}


async def test_nothing_is_masked_unless_the_policy_masks(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=1))
    await finish(buffer, *await admit(buffer, 1))
    assert (await take(buffer, 0)).mask_below == 0


@pytest.mark.parametrize("selector", SELECTORS)
async def test_every_selector_takes_whole_batches_in_ticket_order_and_nothing_twice(
    open_buffer: Open, selector: Selector
) -> None:
    buffer = await open_buffer(policy(S=3, P=2, steps=4, selector=selector, seed=7))
    await finish(buffer, *await admit(buffer, 8))
    batches = [seqs(await train(buffer, version)) for version in range(4)]
    assert all(batch == sorted(batch) for batch in batches)
    assert sorted(seq for batch in batches for seq in batch) == list(range(8))
    assert (batches == [[0, 1], [2, 3], [4, 5], [6, 7]]) == (selector in ORDERED_SELECTORS)
    resume = await buffer.rollback(0)
    assert [seqs(await take(buffer, version, resume.epoch)) for version in range(4)] == batches


async def test_training_starts_once_min_size_groups_are_ready(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=2, steps=2, rate=RateLimit(min_size=3)))
    tickets = await admit(buffer, 4)
    await finish(buffer, *tickets[:2])
    await nothing_to_take(buffer, 0)
    await finish(buffer, tickets[2])
    assert seqs(await train(buffer, 0)) == [0, 1]
    await finish(buffer, tickets[3])
    assert seqs(await train(buffer, 1)) == [2, 3]  # the last two are enough: no more will come


async def test_a_group_is_trained_max_uses_times_and_released_once(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=1, max_uses=2))
    (ticket,) = await admit(buffer, 1)
    await finish(buffer, ticket)
    first = await take(buffer, 0)
    await settle(buffer, first)
    stats = await buffer.stats()
    assert (released(stats), stats.ready, stats.active) == ({}, 1, 1)
    second = await take(buffer, 1)
    assert second.groups == first.groups
    await settle(buffer, second)
    await buffer.release_batch(first)
    await buffer.insert_group(ticket, group_of(ticket))
    stats = await buffer.stats()
    assert (released(stats), stats.used, stats.balanced, stats.kept) == ({"trained": 1}, 2, True, 1)
    await buffer.commit_checkpoint(epoch=1, version=1)
    assert (await buffer.stats()).kept == 1
    await buffer.commit_checkpoint(epoch=1, version=2)
    assert (await buffer.stats()).kept == 0


async def test_a_group_that_grows_old_between_its_uses_was_trained_and_not_stale(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=1, max_uses=2, selector="freshest"))
    old, young = await admit(buffer, 2)
    await finish(buffer, old)
    await settle(buffer, await take(buffer, 0))
    await finish(buffer, young)
    await settle(buffer, await take(buffer, 1))
    await publish(buffer, 2)
    await nothing_to_take(buffer, 2)
    assert released(await buffer.stats()) == {"trained": 2}


async def test_replayed_steps_count_no_use_twice(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=1, max_uses=2))
    await finish(buffer, *await admit(buffer, 1))
    await settle(buffer, await take(buffer, 0))
    await take(buffer, 1)
    resume = await buffer.rollback(0)
    for version, replayed in [(0, True), (1, True)]:
        batch = await take(buffer, version, epoch=resume.epoch)
        assert (seqs(batch), batch.replayed) == ([0], replayed)
        await buffer.release_batch(batch)
    stats = await buffer.stats()
    assert (stats.used, released(stats), stats.active) == (2, {"trained": 1}, 0)


async def test_every_group_is_admitted_only_as_often_as_the_run_can_use_it(open_buffer: Open) -> None:
    """Horizon: 3 uses. One group used twice leaves one use to be admitted for."""
    buffer = await open_buffer(policy(S=1, P=1, steps=3, max_uses=2))
    await finish(buffer, *await admit(buffer, 1))
    for version in range(2):
        await settle(buffer, await take(buffer, version))
    assert len(await admit(buffer, 5)) == 1
    await nothing_to_admit(buffer)


async def test_the_ratio_of_uses_to_inserts_holds_both_sides_back(open_buffer: Open) -> None:
    """R = 1 around 2 groups, error buffer 1.5: 0.5 <= I - U <= 3.5."""
    replay_policy = policy(S=3, P=1, rate=RateLimit.from_ratio(1.0, min_size=2, error_buffer=1.5))
    buffer = await open_buffer(replay_policy)
    tickets = await admit(buffer, 10)
    assert len(tickets) == 3
    await finish(buffer, *tickets[:2])
    await settle(buffer, await take(buffer, 0))
    await nothing_to_take(buffer, 1)  # 2 - (1 + 1) < 0.5
    assert len(await admit(buffer, 10)) == 1
    await nothing_to_admit(buffer)
    await finish(buffer, tickets[2])
    assert seqs(await train(buffer, 1)) == [1]


async def test_a_full_buffer_makes_room_where_the_ratio_wants_inserts(open_buffer: Open) -> None:
    """R = 0.5: half of the groups are never trained; the oldest of them make room for new ones."""
    replay_policy = policy(S=0, P=1, rate=RateLimit.from_ratio(0.5, min_size=1, error_buffer=1.0))
    buffer = await open_buffer(replay_policy)
    trained = []
    for version in range(3):
        for _ in range(2):
            await finish(buffer, *await admit(buffer, 1))
            assert (await buffer.stats()).active == 1
        trained += seqs(await train(buffer, version))
    assert trained == [1, 3, 5]
    assert released(await buffer.stats()) == {"trained": 3, "stale": 3}


async def test_selector_and_window_can_be_changed_during_the_run(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=2, P=1))
    await finish(buffer, *(await admit(buffer, 3))[1:])
    await nothing_to_take(buffer, 0)
    await buffer.update_policy(policy(S=2, P=2, selector="freshest"))
    assert seqs(await train(buffer, 0)) == [1, 2]
    stats = await buffer.stats()
    assert (stats.selector, stats.groups_per_step, stats.active) == ("freshest", 2, 1)
