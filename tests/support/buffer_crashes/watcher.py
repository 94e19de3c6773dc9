"""Reads the counters and the books repeatedly, and journals inconsistencies."""

from __future__ import annotations

import asyncio

from buffer import BufferStats, ReplayBuffer
from buffer.redis.retrying import RetryingClient
from tests.support.buffer_crashes.books import find_inconsistencies, read_books
from tests.support.buffer_crashes.journal import Journal

LOOK_EVERY_S = 0.02


async def watch_run(buffer: ReplayBuffer, link: RetryingClient, journal: Journal) -> None:
    """Watch until killed. Every look is an entry with the counters and the inconsistencies."""
    while True:
        stats = await buffer.stats()
        problems = find_inconsistencies(await read_books(link))
        if not stats.balanced:
            problems.append(f"the counters are not the sizes of the sets: {stats}")
        journal.note("look", active=stats.active, counters=never_decreasing(stats), inconsistencies=problems)
        await asyncio.sleep(LOOK_EVERY_S)


def never_decreasing(stats: BufferStats) -> list[int]:
    """Return the counters that never decrease."""
    ended = [stats.released[reason] for reason in sorted(stats.released)]
    return [stats.epoch, stats.version, stats.tasks_put, stats.admitted, stats.inserted, stats.used, *ended]
