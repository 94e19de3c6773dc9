"""The counters of a run, and a cache of them for readers that ask often, such as `/metrics`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from async_grpo.errors import AsyncGrpoError

STATS_MAX_AGE_S = 1.0
STATS_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class BufferStats:
    """A consistent snapshot of a run's counters."""

    epoch: int
    version: int
    tasks_put: int
    waiting: int
    inflight: int
    ready: int
    taken: int
    admitted: int
    released: dict[str, int] = field(default_factory=dict)
    """Number of groups that ended, for every `ReleaseReason`."""
    released_by_length: dict[str, int] = field(default_factory=dict)
    """"<reason>:<n>": groups whose longest completion had at most n tokens and more than n / 2."""
    max_staleness: int = 0
    groups_per_step: int = 1
    horizon: int = 0
    selector: str = "fifo"
    selector_window: int = 1
    inserted: int = 0
    """Groups that ever became READY."""
    used: int = 0
    """Groups taken; a group counts each time that it was taken."""
    ended: bool = False
    kept: int = 0
    """Groups whose payload is kept: READY, TAKEN, and those that no committed checkpoint contains."""

    @property
    def released_total(self) -> int:
        """Number of groups that ended, for any reason."""
        return sum(self.released.values())

    @property
    def active(self) -> int:
        """Groups that hold a slot of the staleness window."""
        return self.admitted - self.released_total

    @property
    def balanced(self) -> bool:
        """Whether the counters equal the sizes of the sets they count."""
        return self.active == self.inflight + self.ready + self.taken


class CachedStats:
    """The counters, asked for at most once in STATS_MAX_AGE_S seconds."""

    def __init__(self) -> None:
        self.stats: BufferStats | None = None
        """None if the buffer did not answer, or has not been asked."""
        self._at_s = -STATS_MAX_AGE_S
        self._asking = asyncio.Lock()

    async def refresh(self, ask: Callable[[], Awaitable[BufferStats]]) -> None:
        """Ask, unless the last answer is young enough. Raises nothing: without an answer, `stats` becomes None."""
        async with self._asking:
            if time.monotonic() - self._at_s < STATS_MAX_AGE_S:
                return
            try:
                async with asyncio.timeout(STATS_TIMEOUT_S):
                    self.stats = await ask()
            except (AsyncGrpoError, TimeoutError):
                self.stats = None
            self._at_s = time.monotonic()
