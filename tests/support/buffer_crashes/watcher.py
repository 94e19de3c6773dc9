"""Looks at the counters and the books again and again, and writes down what does not fit together."""

from __future__ import annotations

import asyncio

from buffer import BufferStats, ReplayBuffer
from buffer.redis.retrying import RetryingClient
from tests.support.buffer_crashes.books import complaints, read_books
from tests.support.buffer_crashes.journal import Journal

LOOK_EVERY_S = 0.02


async def watch(buffer: ReplayBuffer, link: RetryingClient, journal: Journal) -> None:
    """Until it is killed. Every look is an entry: the counters, and complaints if there are any."""
    while True:
        stats = await buffer.stats()
        said = complaints(await read_books(link))
        if not stats.balanced:
            said.append(f"the counters are not the sizes of the sets: {stats}")
        journal.note("look", active=stats.active, counters=never_decreasing(stats), complaints=said)
        await asyncio.sleep(LOOK_EVERY_S)


def never_decreasing(stats: BufferStats) -> list[int]:
    """The counters that only grow."""
    ended = [stats.released[reason] for reason in sorted(stats.released)]
    return [stats.epoch, stats.version, stats.tasks_put, stats.admitted, stats.inserted, stats.used, *ended]
