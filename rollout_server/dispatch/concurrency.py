"""Limits the number of samples in the engine, and decides when the dispatcher requests the next group.

    ConcurrencyController --resize (every second)------------------------> SampleSlots
    Dispatcher -------------reserve_samples, occupy_slot, release_samples--> SampleSlots

- `SampleSlots`: samples queue for a slot; the end of a sample or a larger capacity unblocks them.
- `ConcurrencyController` waits for its timer only. It gives the engine as many samples as it can run without queueing
  or running out of KV cache; the pure function `next_concurrency` decides.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollout_server.engines.base import Engine, EngineLoad

ADJUST_INTERVAL_S = 1.0
KV_FULL = 0.9
"""Use of the KV cache, as a fraction, above which the engine is about to preempt requests."""
KV_FREE = 0.75
"""Use of the KV cache, as a fraction, below which it has room for more samples."""
MAX_QUEUED_FRACTION = 0.05
"""Requests queued inside the engine, as a fraction of the running ones, that are not yet a sign of overload."""
STEP_FRACTION = 0.1
"""Relative change of the capacity per decision."""


class SampleSlots:
    """Slots for `capacity` concurrent samples; more samples queue, first come first served.

    Every sample of an admitted group has a reservation until it has finished. Another group is wanted while
    reserved < capacity, so with groups of G samples at most capacity - 1 + G are reserved: the engine stays full, and
    fewer than G samples queue. A smaller capacity takes effect as samples finish.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reserved = 0
        self.in_use = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._changed = asyncio.Event()

    @property
    def has_room(self) -> bool:
        """True if another group is wanted."""
        return self.reserved < self.capacity

    def groups_to_fill_free_slots(self, size: int) -> int:
        """Number of groups of `size` samples that leave no slot free, at least one.

        >>> SampleSlots(20).groups_to_fill_free_slots(8)
        3
        """
        free = self.capacity - self.reserved
        return max(1, math.ceil(free / size))

    def groups_to_fill_all_slots(self, size: int) -> int:
        """Number of groups of `size` samples that fill all slots of an idle server.

        >>> SampleSlots(20).groups_to_fill_all_slots(8)
        3
        """
        return max(1, math.ceil(self.capacity / size))

    async def wait_for_room(self) -> None:
        """Wait until another group is wanted; the end of a sample or a larger capacity unblocks it."""
        while not self.has_room:
            self._changed.clear()
            await self._changed.wait()

    def resize(self, capacity: int) -> None:
        """Set the capacity. A smaller one takes effect as samples finish."""
        self.capacity = capacity
        self._changed.set()
        self._grant_slots()

    def reserve_samples(self, samples: int) -> None:
        """Reserve slots for the samples of a group that was just admitted."""
        self.reserved += samples

    def release_samples(self, samples: int = 1) -> None:
        """Give up the reservations of samples that need no slot any more."""
        self.reserved -= samples
        self._changed.set()

    @asynccontextmanager
    async def occupy_slot(self) -> AsyncIterator[None]:
        """Wait for a slot and occupy it within the block."""
        await self._acquire_slot()
        try:
            yield
        finally:
            self.in_use -= 1
            self._grant_slots()

    async def _acquire_slot(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._queue.append(waiter)
        self._grant_slots()
        try:
            await waiter
        except asyncio.CancelledError:
            # If the slot was granted just before the cancellation, `occupy_slot` never enters its block. So we free the
            # slot here, or it would be lost.
            if waiter.done() and not waiter.cancelled():
                self.in_use -= 1
                self._grant_slots()
            raise

    def _grant_slots(self) -> None:
        """Give free slots to the samples at the head of the queue."""
        while self._queue and self.in_use < self.capacity:
            waiter = self._queue.popleft()
            if not waiter.done():  # a waiter that is done was cancelled in the queue
                self.in_use += 1
                waiter.set_result(None)


class ConcurrencyController:
    """Adapts the capacity of the slots to the engine's load, between `min_capacity` and `max_capacity`."""

    def __init__(self, engine: Engine, slots: SampleSlots, *, min_capacity: int, max_capacity: int) -> None:
        self._engine = engine
        self._slots = slots
        self._min_capacity = min_capacity
        self._max_capacity = max_capacity
        self._last_tokens: int | None = None
        """Tokens that the engine had generated at the last adjustment."""

    async def run_adjusting(self) -> None:
        """Adjust the capacity every second, until cancelled."""
        while True:
            await asyncio.sleep(ADJUST_INTERVAL_S)
            self.adjust_capacity()

    def adjust_capacity(self) -> None:
        """Read the engine's load once, and resize the slots if `next_concurrency` changes the capacity."""
        load = self._engine.load()
        tokens = load.generated_tokens + load.streamed_tokens
        is_paused = tokens == self._last_tokens
        self._last_tokens = tokens
        # An engine without a new token is paused for a weight update, or asleep. Its requests queue because of that,
        # and would shrink the capacity at every adjustment.
        if is_paused:
            return

        capacity = next_concurrency(self._slots.capacity, self._slots.in_use, load)
        bounded = min(self._max_capacity, max(self._min_capacity, capacity))
        if bounded != self._slots.capacity:
            self._slots.resize(bounded)


def next_concurrency(capacity: int, in_use: int, load: EngineLoad) -> int:
    """Return the next capacity in samples.

    A tenth less if the engine queues requests or its KV cache is nearly full, a tenth more if all slots are in use and
    the cache has room, otherwise unchanged.
    """
    step = math.ceil(STEP_FRACTION * capacity)
    if load.kv_use > KV_FULL or load.queued > MAX_QUEUED_FRACTION * load.running + 1:
        return capacity - step
    if in_use >= capacity and load.kv_use < KV_FREE:
        return capacity + step
    return capacity
