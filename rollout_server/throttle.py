"""How many samples one engine gets: as many as it can run without queueing or running out of KV cache.

It waits for its timer only. The decision is pure: `next_concurrency`.
"""

from __future__ import annotations

import asyncio
import math

from rollout_server.engines.protocol import Engine, EngineLoad
from rollout_server.slots import SampleSlots

EVERY_S = 1.0
KV_FULL, KV_FREE = 0.9, 0.75
"""Shares of the KV cache: above the first the engine is about to preempt requests, below the second there is room."""
QUEUE_SHARE = 0.05
"""Requests that wait inside the engine, as a share of those that run, that are no sign of overload."""
STEP = 0.1
"""The share by which the number changes."""


class Throttle:
    """Moves the capacity of the slots between `least` and `most`."""

    def __init__(self, engine: Engine, slots: SampleSlots, *, least: int, most: int) -> None:
        self._engine = engine
        self._slots = slots
        self._least = least
        self._most = most

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            self.adjust()

    def adjust(self) -> None:
        """One decision."""
        capacity = next_concurrency(self._slots.capacity, self._slots.in_use, self._engine.load())
        bounded = min(self._most, max(self._least, capacity))
        if bounded != self._slots.capacity:
            self._slots.resize(bounded)


def next_concurrency(capacity: int, in_use: int, load: EngineLoad) -> int:
    """A tenth less where the engine queues requests or its KV cache is nearly full; a tenth more where all slots are
    used and there is room; otherwise the same."""
    step = math.ceil(STEP * capacity)
    if load.kv_use > KV_FULL or load.waiting > QUEUE_SHARE * load.running + 1:
        return capacity - step
    if in_use >= capacity and load.kv_use < KV_FREE:
        return capacity + step
    return capacity
