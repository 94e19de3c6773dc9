"""The counters of a run for whoever is asked for them often, such as a page of metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from async_grpo.errors import AsyncGrpoError
from buffer.protocol import BufferStats

STATS_MAX_AGE_S = 1.0
STATS_TIMEOUT_S = 2.0


class RecentStats:
    """Asks the buffer at most once a second, however often somebody wants to know."""

    def __init__(self) -> None:
        self.stats: BufferStats | None = None
        """None if the buffer did not answer, or has not been asked."""
        self._at_s = -STATS_MAX_AGE_S
        self._asking = asyncio.Lock()

    async def refresh(self, ask: Callable[[], Awaitable[BufferStats]]) -> None:
        """Ask unless the last answer is young enough. Raises nothing: who needs the buffer deals with its faults."""
        async with self._asking:
            if time.monotonic() - self._at_s < STATS_MAX_AGE_S:
                return
            try:
                async with asyncio.timeout(STATS_TIMEOUT_S):
                    self.stats = await ask()
            except (AsyncGrpoError, TimeoutError):
                self.stats = None
            self._at_s = time.monotonic()
