"""Room for samples: how many run in the engine, and when to ask for the next group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class SampleSlots:
    """`capacity` samples run at once; samples beyond it queue in the order in which they came.

    Every admitted sample is committed until it has finished. A new group is wanted while
    committed < capacity, so with groups of G samples at most capacity - 1 + G are committed: the
    engine stays full and fewer than G samples wait.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.committed = 0
        self._running = asyncio.Semaphore(capacity)
        self._changed = asyncio.Event()

    @property
    def has_room(self) -> bool:
        """Whether another group is wanted."""
        return self.committed < self.capacity

    async def room(self) -> None:
        """Wait until a sample slot is free; a sample that finishes unblocks it."""
        while not self.has_room:
            self._changed.clear()
            await self._changed.wait()

    def commit(self, samples: int) -> None:
        """A group with so many samples to make was admitted."""
        self.committed += samples

    def finish(self, samples: int = 1) -> None:
        """So many committed samples need no slot any more."""
        self.committed -= samples
        self._changed.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Hold one slot of the engine."""
        async with self._running:
            yield
