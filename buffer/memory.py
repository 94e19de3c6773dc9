"""The replay buffer within one process: the reference implementation, and the one for tests.

`Ledger` decides; this file only waits. Whatever changes the counters wakes every waiter, and each
looks again. A wait also ends when the next lease expires.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from async_grpo.errors import WaitTimeout
from async_grpo.staleness.policy import ReplayPolicy
from async_grpo.wire import Batch, Group, Partial, ReleaseReason, Task, Ticket
from buffer.faults import groups_of_step
from buffer.ledger import Ledger
from buffer.protocol import BufferStats, Resume

T = TypeVar("T")


class InMemoryBuffer:
    """`ReplayBuffer` of one event loop. `clock` gives the seconds that leases are measured in."""

    def __init__(
        self, policy: ReplayPolicy, *, lease_s: float, max_attempts: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._ledger = Ledger(policy, lease_s, max_attempts)
        self._clock = clock
        self._changed = asyncio.Event()

    async def put_tasks(self, tasks: Sequence[Task]) -> int:
        with self._change() as ledger:
            return ledger.put_tasks(tasks)

    async def admit(self, limit: int, *, holder: str, timeout_s: float) -> list[Ticket]:
        def attempt() -> list[Ticket]:
            with self._change() as ledger:
                return ledger.admit(limit, holder, self._clock())

        return await self._until(attempt, "room in the staleness window and a task", timeout_s)

    async def heartbeat(self, tickets: Sequence[Ticket]) -> list[int]:
        return self._ledger.heartbeat(tickets, self._clock())

    async def progress(self, ticket: Ticket, partial: Partial) -> None:
        self._ledger.progress(ticket, partial, self._clock())

    async def give_back(self, ticket: Ticket) -> None:
        self._ledger.give_back(ticket)
        self._wake()

    async def insert(self, ticket: Ticket, group: Group) -> None:
        with self._change() as ledger:
            ledger.insert(ticket, group)

    async def discard(self, ticket: Ticket, reason: ReleaseReason) -> None:
        with self._change() as ledger:
            ledger.discard(ticket, reason)

    async def take(self, *, epoch: int, version: int, timeout_s: float) -> Batch:
        def attempt() -> Batch | None:
            with self._change() as ledger:
                return ledger.take(epoch, version, self._clock())

        return await self._until(attempt, groups_of_step(version), timeout_s)

    async def take_part(self, *, epoch: int, version: int, have: int, timeout_s: float) -> Batch:
        def attempt() -> Batch | None:
            with self._change() as ledger:
                return ledger.take(epoch, version, self._clock(), have=have, whole=False)

        return await self._until(attempt, groups_of_step(version), timeout_s)

    async def release(self, batch: Batch) -> None:
        with self._change() as ledger:
            ledger.release(batch)

    async def publish_version(self, *, epoch: int, version: int) -> None:
        self._ledger.publish_version(epoch, version)

    async def commit_checkpoint(self, *, epoch: int, version: int) -> None:
        with self._change() as ledger:
            ledger.commit_checkpoint(epoch, version)

    async def rollback(self, version: int) -> Resume:
        with self._change() as ledger:
            return ledger.rollback(version)

    async def update_admission(self, policy: ReplayPolicy) -> None:
        with self._change() as ledger:
            ledger.policy = policy

    async def end(self) -> None:
        with self._change() as ledger:
            ledger.ended = True

    async def stats(self) -> BufferStats:
        return self._ledger.stats()

    async def aclose(self) -> None:
        """Nothing is open."""

    @contextmanager
    def _change(self) -> Iterator[Ledger]:
        before = self._ledger.stats()
        yield self._ledger
        if self._ledger.stats() != before:
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, attempt: Callable[[], T | None], waited_for: str, timeout_s: float) -> T:
        """The first result that is neither None nor empty. Raises WaitTimeout."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not (answer := attempt()):
            left_s = deadline - loop.time()
            if left_s <= 0:
                raise WaitTimeout(waited_for, timeout_s)
            await self._sleep(min(left_s, self._next_lease_s()))
        return answer

    async def _sleep(self, for_s: float) -> None:
        """Until something changes, or for_s."""
        changed = self._changed
        try:
            async with asyncio.timeout(for_s):
                await changed.wait()
        except TimeoutError:
            return

    def _next_lease_s(self) -> float:
        now_s = self._clock()
        deadline_s = self._ledger.next_deadline_s(now_s)
        return float("inf") if deadline_s is None else deadline_s - now_s
