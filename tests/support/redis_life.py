"""One life of a run on whatever server a configuration names."""

from __future__ import annotations

import asyncio

from async_grpo.config.buffer import RedisConfig
from async_grpo.wire import ReleaseReason
from buffer import RedisBuffer, connect, connect_board, run_exists, wipe_run
from tests.support.buffer_cases import admit, finish, partial_of, policy, released, tasks, train


async def attach(config: RedisConfig, run: str) -> RedisBuffer:
    """A run with S = 1 and P = 2."""
    return await connect(config, run, policy=policy(S=1, P=2), lease_s=30.0, max_attempts=3)


async def begin(config: RedisConfig, run: str, count: int = 20) -> RedisBuffer:
    """The run has tasks, and a trainer in epoch 1."""
    buffer = await attach(config, run)
    await buffer.put_tasks(tasks(0, count))
    await buffer.rollback(0)
    return buffer


async def live_through(config: RedisConfig, run: str) -> None:
    """Every kind of call once, with the counts that must come of it; afterwards nothing of the run is left."""
    buffer = await begin(config, run)
    board = await connect_board(config, run)
    first, second, third, fourth = await admit(buffer, 4)
    await buffer.save_partial(first, partial_of(first))
    assert await buffer.renew_leases([first, second]) == []
    await finish(buffer, first, second)
    await buffer.discard_group(third, ReleaseReason.FILTERED)
    await buffer.give_back(fourth)
    await train(buffer, 0)
    await buffer.commit_checkpoint(epoch=1, version=1)
    waiting = asyncio.create_task(buffer.take_batch(epoch=1, version=1, timeout_s=10.0))
    await finish(buffer, *await admit(buffer, 2))
    batch = await waiting
    assert len(batch.groups) == 2
    stats = await buffer.stats()
    assert (released(stats), stats.taken, stats.active) == ({"trained": 2, "filtered": 1}, 2, 2)
    await board.add_to_counter("samples", 3)
    assert await board.claim_job("evaluation", "me", ttl_s=10.0)
    assert await board.counters() == {"samples": 3}
    await asyncio.gather(buffer.aclose(), board.aclose())
    assert await run_exists(config, run)
    assert await wipe_run(config, run) > 5
    assert not await run_exists(config, run)
