"""How many samples run in the engine at once, and when the dispatcher asks for the next group.

    ConcurrencyController --resize (every second)--> SampleSlots <--commit, running, finish-- Dispatcher

- `SampleSlots`: a sample waits for its turn; a sample that ends, or a larger capacity, unblocks it.
- `ConcurrencyController` waits for its timer only. It gives the engine as many samples as it can run without queueing
  or running out of KV cache; `next_concurrency` decides that and is pure.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollout_server.engines.base import Engine, EngineLoad

EVERY_S = 1.0
KV_FULL, KV_FREE = 0.9, 0.75
"""Shares of the KV cache: above the first the engine is about to preempt requests, below the second there is room."""
QUEUE_SHARE = 0.05
"""Requests queued inside the engine, as a share of the running ones, that are not yet a sign of overload."""
STEP = 0.1
"""Share by which the number of samples changes in one decision."""


class SampleSlots:
    """`capacity` samples run at once; samples beyond it queue in the order in which they came.

    Every admitted sample is committed until it has finished. A new group is wanted while
    committed < capacity, so with groups of G samples at most capacity - 1 + G are committed: the
    engine stays full, and fewer than G samples wait. A capacity that shrinks takes effect as samples finish.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.committed = 0
        self.in_use = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._changed = asyncio.Event()

    @property
    def has_room(self) -> bool:
        """Whether another group is wanted."""
        return self.committed < self.capacity

    def groups_wanted(self, size: int) -> int:
        """How many groups of `size` samples leave no slot free, at least one.

        >>> SampleSlots(20).groups_wanted(8)
        3
        """
        return max(1, -(-(self.capacity - self.committed) // size))

    def groups_at_once(self, size: int) -> int:
        """How many groups of `size` samples fill all slots.

        >>> SampleSlots(20).groups_at_once(8)
        3
        """
        return max(1, -(-self.capacity // size))

    async def room(self) -> None:
        """Wait until a sample slot is free; a sample that finishes, or a larger capacity, unblocks it."""
        while not self.has_room:
            self._changed.clear()
            await self._changed.wait()

    def resize(self, capacity: int) -> None:
        """Let `capacity` samples run from now on. A smaller capacity takes effect as samples finish."""
        self.capacity = capacity
        self._changed.set()
        self._admit()

    def commit(self, samples: int) -> None:
        """Count `samples` samples of a group that was just admitted."""
        self.committed += samples

    def finish(self, samples: int = 1) -> None:
        """Say that `samples` committed samples need no slot any more."""
        self.committed -= samples
        self._changed.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Hold one slot for the length of the block; waits for it first."""
        await self._enter()
        try:
            yield
        finally:
            self.in_use -= 1
            self._admit()

    async def _enter(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the slot was granted in the same moment
                self.in_use -= 1
                self._admit()
            raise

    def _admit(self) -> None:
        while self._queue and self.in_use < self.capacity:
            turn = self._queue.popleft()
            if not turn.done():  # else it was cancelled while it waited
                self.in_use += 1
                turn.set_result(None)


class ConcurrencyController:
    """Moves the capacity of the slots between `least` and `most`."""

    def __init__(self, engine: Engine, slots: SampleSlots, *, least: int, most: int) -> None:
        self._engine = engine
        self._slots = slots
        self._least = least
        self._most = most
        self._tokens = -1
        """Tokens that the engine had made at the last look."""

    async def run(self) -> None:
        """Adjust the capacity every second, until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            self.adjust()

    def adjust(self) -> None:
        """Look at the engine's load once and resize the slots if `next_concurrency` says so.

        An engine that has made no token since the last look is paused for an update, or asleep: what waits in it then
        waits for that, and would shrink the capacity at every look.
        """
        load = self._engine.load()
        tokens = load.generated_tokens + load.streamed_tokens
        is_paused = tokens == self._tokens
        self._tokens = tokens
        if is_paused:
            return
        capacity = next_concurrency(self._slots.capacity, self._slots.in_use, load)
        bounded = min(self._most, max(self._least, capacity))
        if bounded != self._slots.capacity:
            self._slots.resize(bounded)


def next_concurrency(capacity: int, in_use: int, load: EngineLoad) -> int:
    """The next capacity in samples: a tenth less if the engine queues requests or its KV cache is nearly full, a tenth
    more if all slots are used and the cache has room, else the same."""
    step = math.ceil(STEP * capacity)
    if load.kv_use > KV_FULL or load.queued > QUEUE_SHARE * load.running + 1:
        return capacity - step
    if in_use >= capacity and load.kv_use < KV_FREE:
        return capacity + step
    return capacity
