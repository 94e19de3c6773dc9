"""The replay buffer and the run board within one process: the reference implementations, also for tests.

`BufferState` decides, and this file only waits. Every change of the counters wakes all waiters, which then try again.
A wait also ends when the next lease expires.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from async_grpo.errors import WaitTimeout
from async_grpo.staleness import ReplayPolicy
from async_grpo.wire import Batch, Group, Partial, ReleaseReason, Task, Ticket
from async_grpo.wire.board import Evaluation, Probe, PublisherAddress, ReplayProgress, ServerBeat
from buffer.base import BufferStats, Resume
from buffer.capacity import NO_QUOTA, MemoryQuota
from buffer.errors import groups_of_step
from buffer.fair_share import FAIR_WAIT_S
from buffer.state import BufferState

T = TypeVar("T")


class InMemoryBuffer:
    """`ReplayBuffer` of one event loop. `clock` returns the time in seconds, against which leases expire."""

    def __init__(
        self,
        policy: ReplayPolicy,
        *,
        lease_s: float,
        max_attempts: int,
        quota: MemoryQuota = NO_QUOTA,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._state = BufferState(policy, lease_s, max_attempts, quota=quota)
        self._clock = clock
        self._changed = asyncio.Event()

    async def put_tasks(self, tasks: Sequence[Task]) -> int:
        with self._change() as state:
            return state.put_tasks(tasks)

    async def admit(self, limit: int, *, holder: str, timeout_s: float, slots: int | None = None) -> list[Ticket]:
        kept_since, kept_s = 0, 0.0
        loop = asyncio.get_running_loop()

        def attempt() -> list[Ticket]:
            nonlocal kept_since, kept_s
            now_s = self._clock()
            is_late = kept_since > 0 and loop.time() - kept_s >= FAIR_WAIT_S
            with self._change() as state:
                tickets = state.admit(limit, holder, now_s, slots=slots, kept_since=kept_since if is_late else 0)
            if tickets or not state.has_room(now_s):
                kept_since = 0
            elif is_late or not kept_since:
                kept_since, kept_s = state.asks, loop.time()
            return tickets

        def again_s() -> float:
            return kept_s + FAIR_WAIT_S - loop.time() if kept_since else math.inf

        return await self._until(attempt, "room in the staleness window and a task", timeout_s, again_s)

    async def heartbeat(self, tickets: Sequence[Ticket]) -> list[int]:
        return self._state.heartbeat(tickets, self._clock())

    async def progress(self, ticket: Ticket, partial: Partial) -> None:
        self._state.progress(ticket, partial, self._clock())

    async def give_back(self, ticket: Ticket, *, strike: bool = False) -> None:
        self._state.give_back(ticket, strike=strike)
        self._wake()

    async def expire_leases(self, name: str, *, life: int) -> None:
        self._state.expire_leases(name, life, self._clock())
        self._wake()

    async def insert(self, ticket: Ticket, group: Group) -> None:
        with self._change() as state:
            state.insert(ticket, group)

    async def discard(self, ticket: Ticket, reason: ReleaseReason) -> None:
        with self._change() as state:
            state.discard(ticket, reason)

    async def take(self, *, epoch: int, version: int, timeout_s: float) -> Batch:
        def attempt() -> Batch | None:
            with self._change() as state:
                return state.take(epoch, version, self._clock())

        return await self._until(attempt, groups_of_step(version), timeout_s)

    async def take_part(self, *, epoch: int, version: int, have: int, timeout_s: float) -> Batch:
        def attempt() -> Batch | None:
            with self._change() as state:
                return state.take(epoch, version, self._clock(), have=have, whole=False)

        return await self._until(attempt, groups_of_step(version), timeout_s)

    async def release(self, batch: Batch) -> None:
        with self._change() as state:
            state.release(batch)

    async def publish_version(self, *, epoch: int, version: int) -> None:
        self._state.publish_version(epoch, version)

    async def commit_checkpoint(self, *, epoch: int, version: int) -> None:
        with self._change() as state:
            state.commit_checkpoint(epoch, version)

    async def rollback(self, version: int, *, accept_loss: bool = False) -> Resume:
        with self._change() as state:
            return state.rollback(version, accept_loss=accept_loss)

    async def update_admission(self, policy: ReplayPolicy) -> None:
        with self._change() as state:
            state.policy = policy

    async def set_staleness(self, *, epoch: int, staleness: int) -> None:
        with self._change() as state:
            state.set_staleness(epoch, staleness)

    async def end(self) -> None:
        with self._change() as state:
            state.ended = True

    async def stats(self) -> BufferStats:
        return self._state.stats()

    async def aclose(self) -> None:
        """Nothing to close."""

    @contextmanager
    def _change(self) -> Iterator[BufferState]:
        before = self._state.stats()
        yield self._state
        if self._state.stats() != before:
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(
        self,
        attempt: Callable[[], T | None],
        waited_for: str,
        timeout_s: float,
        again_s: Callable[[], float] = lambda: math.inf,
    ) -> T:
        """The first result that is neither None nor empty. `again_s`: seconds after which to try again at the latest.
        Raises WaitTimeout."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not (answer := attempt()):
            left_s = deadline - loop.time()
            if left_s <= 0:
                raise WaitTimeout(waited_for, timeout_s)
            await self._sleep(max(0.0, min(left_s, self._next_lease_s(), again_s())))
        return answer

    async def _sleep(self, for_s: float) -> None:
        """Wait until something changes, for at most `for_s` seconds."""
        changed = self._changed
        try:
            async with asyncio.timeout(for_s):
                await changed.wait()
        except TimeoutError:
            return

    def _next_lease_s(self) -> float:
        now_s = self._clock()
        deadline_s = self._state.next_deadline_s(now_s)
        return float("inf") if deadline_s is None else deadline_s - now_s


class InMemoryBoard:
    """`RunBoard` of one event loop. `clock` returns the time in seconds, against which a ttl expires."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._publisher: PublisherAddress | None = None
        self._replay: ReplayProgress | None = None
        self._beats: dict[str, tuple[ServerBeat, float]] = {}
        self._counters: Counter[str] = Counter()
        self._claims: dict[str, tuple[str, float]] = {}
        self._evaluations: dict[int, Evaluation] = {}
        self._probe: Probe | None = None
        self._probed = asyncio.Condition()

    async def set_publisher(self, address: PublisherAddress) -> None:
        if self._publisher is None or address.epoch >= self._publisher.epoch:
            self._publisher = address

    async def publisher(self) -> PublisherAddress | None:
        return self._publisher

    async def report_replay(self, progress: ReplayProgress) -> None:
        if self._replay is None or progress.epoch >= self._replay.epoch:
            self._replay = progress

    async def replay_progress(self) -> ReplayProgress | None:
        return self._replay

    async def beat(self, beat: ServerBeat, *, ttl_s: float) -> None:
        self._beats[beat.name] = (beat, self._clock() + ttl_s)

    async def servers(self) -> list[ServerBeat]:
        now_s = self._clock()
        return [beat for _, (beat, until_s) in sorted(self._beats.items()) if until_s > now_s]

    async def count(self, name: str, amount: int) -> None:
        self._counters[name] += amount

    async def counters(self) -> dict[str, int]:
        return dict(self._counters)

    async def claim(self, what: str, holder: str, *, ttl_s: float) -> bool:
        current = self._claims.get(what)
        if current is not None and current[0] != holder and current[1] > self._clock():
            return False
        self._claims[what] = (holder, self._clock() + ttl_s)
        return True

    async def put_evaluation(self, evaluation: Evaluation) -> None:
        self._evaluations.setdefault(evaluation.version, evaluation)

    async def evaluations(self) -> list[Evaluation]:
        return [self._evaluations[version] for version in sorted(self._evaluations)]

    async def put_probe(self, probe: Probe) -> None:
        async with self._probed:
            if self._probe is None or probe.version >= self._probe.version:
                self._probe = probe
            self._probed.notify_all()

    async def probe(self, version: int, *, timeout_s: float) -> Probe:
        waited_for = f"the probe of version {version} from a rollout server"
        try:
            async with asyncio.timeout(timeout_s), self._probed:
                await self._probed.wait_for(lambda: self._probe is not None and self._probe.version >= version)
        except TimeoutError:
            raise WaitTimeout(waited_for, timeout_s) from None
        assert self._probe is not None
        if self._probe.version > version:
            raise WaitTimeout(waited_for, 0, f"The probe of version {self._probe.version} has already replaced it")
        return self._probe

    async def aclose(self) -> None:
        """Nothing to close."""
