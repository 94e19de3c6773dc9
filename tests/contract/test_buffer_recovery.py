"""A trainer that takes over gets back exactly what its checkpoint does not contain."""

from __future__ import annotations

import asyncio

import pytest

from async_grpo.errors import BufferFault, Fenced, RunEnded, StepsForgotten
from async_grpo.staleness import RateLimit
from tests.support.buffer_cases import (
    Open,
    admit,
    finish,
    generate_and_train,
    policy,
    publish,
    released,
    seqs,
    take,
    train,
)


async def test_an_older_epoch_is_fenced(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=1))
    await finish(buffer, *await admit(buffer, 1))
    batch = await take(buffer, 0)
    resume = await buffer.rollback(0)
    assert resume.epoch == 2
    for late in (
        buffer.take_batch(epoch=1, version=0, timeout_s=0),
        buffer.release_batch(batch),
        buffer.publish_version(epoch=1, version=9),
        buffer.commit_checkpoint(epoch=1, version=9),
    ):
        with pytest.raises(Fenced, match=r"epoch 1\b.*epoch 2\b"):
            await late
    assert ((await buffer.stats()).taken, (await buffer.stats()).version) == (1, 0)


async def test_a_trainer_that_waits_learns_that_another_took_over(open_buffer: Open) -> None:
    buffer = await open_buffer()
    waiting = asyncio.create_task(take(buffer, 0))
    await asyncio.sleep(0.05)
    await buffer.rollback(0)
    async with asyncio.timeout(1):
        with pytest.raises(Fenced):
            await waiting


async def test_the_batches_after_the_checkpoint_are_delivered_again(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=2))
    batches = [await generate_and_train(buffer, version) for version in range(4)]
    await buffer.commit_checkpoint(epoch=1, version=2)
    await finish(buffer, *await admit(buffer, 2))
    unfinished = await take(buffer, 4)
    before = await buffer.stats()

    resume = await buffer.rollback(2)
    assert (resume.epoch, resume.head_version) == (2, 4)
    for version in (2, 3):
        again = await take(buffer, version, epoch=2)
        assert (again.groups, again.replayed, again.epoch) == (batches[version].groups, True, 2)
        await buffer.release_batch(again)
    stats = await buffer.stats()
    assert (released(stats), stats.active, stats.taken) == (released(before), before.active, before.taken)
    assert stats.active <= 4

    again = await train(buffer, 4, epoch=2)
    assert (again.groups, again.replayed) == (unfinished.groups, True)
    assert released(await buffer.stats()) == {"trained": 10}
    assert not (await generate_and_train(buffer, 5, epoch=2)).replayed


async def test_a_trainer_may_die_again_while_it_replays(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=2))
    batches = [await generate_and_train(buffer, version) for version in range(3)]
    for epoch in (2, 3):
        await buffer.rollback(0)
        assert [seqs(await take(buffer, version, epoch)) for version in range(3)] == [seqs(b) for b in batches]
    assert released(await buffer.stats()) == {"trained": 6}


async def test_a_take_over_does_not_disturb_the_rollout_servers(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=1))
    ticket, other = await admit(buffer, 2)
    await buffer.rollback(0)
    assert await buffer.renew_leases([ticket, other]) == []
    await finish(buffer, ticket)
    assert seqs(await take(buffer, 0, epoch=2)) == [0]


async def test_groups_of_a_checkpoint_are_released_without_a_call_of_its_trainer(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=2))
    await finish(buffer, *await admit(buffer, 2))
    await take(buffer, 0)
    resume = await buffer.rollback(1)
    stats = await buffer.stats()
    assert (resume.head_version, released(stats), stats.active) == (1, {"trained": 2}, 0)
    assert {ticket.version for ticket in await admit(buffer, 2)} == {1}


async def test_a_committed_checkpoint_frees_the_payloads_before_it(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=2))
    for version in range(3):
        await generate_and_train(buffer, version)
    assert (await buffer.stats()).kept == 6
    await buffer.commit_checkpoint(epoch=1, version=2)
    await buffer.commit_checkpoint(epoch=1, version=2)
    assert (await buffer.stats()).kept == 2
    assert released(await buffer.stats()) == {"trained": 6}


async def test_steps_that_were_committed_cannot_be_asked_for_again(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=1))
    await generate_and_train(buffer, 0)
    await buffer.commit_checkpoint(epoch=1, version=1)
    with pytest.raises(BufferFault, match=r"version 1\b"):
        await buffer.rollback(0)
    assert (await buffer.stats()).epoch == 1


async def test_logged_batches_are_delivered_even_after_the_end(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=1, steps=1))
    batch = await generate_and_train(buffer, 0)
    await buffer.end_run()
    await publish(buffer, 1)
    assert await take(buffer, 0) == batch
    with pytest.raises(RunEnded):
        await take(buffer, 1)


async def test_a_trainer_that_has_steps_left_reopens_an_ended_run(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=0, P=1, steps=2))
    await generate_and_train(buffer, 0)
    await buffer.end_run()
    await buffer.rollback(1)
    await generate_and_train(buffer, 1, epoch=2)
    await buffer.end_run()
    await buffer.rollback(2)
    assert (await buffer.stats()).ended


async def test_a_trainer_that_accepts_the_loss_starts_generation_again_at_its_version(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=2, steps=6))
    for version in range(4):
        await generate_and_train(buffer, version)
    await buffer.commit_checkpoint(epoch=1, version=3)
    await finish(buffer, *(await admit(buffer, 4))[:3])
    await take(buffer, 4)
    with pytest.raises(StepsForgotten, match=r"--from 1\b"):
        await buffer.rollback(1)

    resume = await buffer.rollback(1, accept_loss=True)
    assert (resume.epoch, resume.head_version, resume.lost_steps) == (2, 1, 2)
    stats = await buffer.stats()
    assert (stats.active, stats.kept, stats.version, stats.used) == (0, 0, 1, 2)
    assert released(stats) == {"trained": 8, "stale": 3, "expired": 1}
    for version in range(1, 6):
        batch = await generate_and_train(buffer, version, epoch=2)
        assert not batch.replayed
        assert max(group.newest_version for group in batch.groups) <= version
    stats = await buffer.stats()
    assert (stats.balanced, stats.used, stats.active) == (True, 12, 0)


async def test_the_ratio_of_uses_to_inserts_starts_again_after_a_loss(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=1, P=2, steps=6, rate=RateLimit(min_diff=-4.0, max_diff=4.0)))
    for version in range(4):
        await generate_and_train(buffer, version)
    await buffer.commit_checkpoint(epoch=1, version=4)
    await buffer.rollback(1, accept_loss=True)
    stats = await buffer.stats()
    assert (stats.used, stats.inserted) == (2, 2)
    for version in range(1, 6):
        await generate_and_train(buffer, version, epoch=2)


async def test_a_take_that_arrives_after_its_checkpoint_takes_no_new_groups(open_buffer: Open) -> None:
    buffer = await open_buffer(policy(S=2, P=1))
    await finish(buffer, *await admit(buffer, 3))
    await train(buffer, 0)
    await buffer.commit_checkpoint(epoch=1, version=1)
    with pytest.raises(BufferFault):
        await take(buffer, 0)
    assert (await buffer.stats()).taken == 0
