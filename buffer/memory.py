"""The replay buffer and the run board within one process: the reference implementations, also used by tests.

`BufferState` makes all decisions; this module only adds waiting. A change of the counters wakes all waiting calls,
which then retry. They also retry when the next lease expires.
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
from buffer.errors import describe_batch_wait
from buffer.fair_share import FAIR_WAIT_S
from buffer.state import BufferState

T = TypeVar("T")


class InMemoryBuffer:
    """`ReplayBuffer` of one event loop. `clock` returns the time in seconds by which leases expire."""

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
        with self._wake_on_change() as state:
            return state.put_tasks(tasks)

    async def admit_groups(
        self, limit: int, *, holder: str, timeout_s: float, slots: int | None = None
    ) -> list[Ticket]:
        loop = asyncio.get_running_loop()
        # While all room is reserved for other servers: the request counter and the time when we first saw that. After
        # FAIR_WAIT_S, servers that have not requested since then no longer count (see `buffer.fair_share`).
        reserved_since: int | None = None
        reserved_at_s = 0.0

        def try_to_admit() -> list[Ticket]:
            nonlocal reserved_since, reserved_at_s
            now_s = self._clock()
            has_waited = reserved_since is not None and loop.time() - reserved_at_s >= FAIR_WAIT_S
            with self._wake_on_change() as state:
                tickets = state.admit_groups(
                    limit, holder, now_s, slots=slots, reserved_since=(reserved_since or 0) if has_waited else 0
                )
            if tickets or not state.has_room(now_s):
                reserved_since = None
            elif has_waited or reserved_since is None:
                reserved_since = state.unserved_requests
                reserved_at_s = loop.time()
            return tickets

        def seconds_to_retry() -> float:
            if reserved_since is None:
                return math.inf
            return reserved_at_s + FAIR_WAIT_S - loop.time()

        return await self._retry_until(
            try_to_admit, "room in the staleness window and a task", timeout_s, seconds_to_retry
        )

    async def renew_leases(self, tickets: Sequence[Ticket]) -> list[int]:
        return self._state.renew_leases(tickets, self._clock())

    async def save_partial(self, ticket: Ticket, partial: Partial) -> None:
        self._state.save_partial(ticket, partial, self._clock())

    async def give_back(self, ticket: Ticket, *, count_as_expired: bool = False) -> None:
        self._state.give_back(ticket, count_as_expired=count_as_expired)
        self._wake()  # also without a change of the counters: the group may be admitted

    async def expire_leases(self, name: str, *, life: int) -> None:
        self._state.expire_leases(name, life, self._clock())
        self._wake()

    async def insert_group(self, ticket: Ticket, group: Group) -> None:
        with self._wake_on_change() as state:
            state.insert_group(ticket, group)

    async def discard_group(self, ticket: Ticket, reason: ReleaseReason) -> None:
        with self._wake_on_change() as state:
            state.discard_group(ticket, reason)

    async def take_batch(self, *, epoch: int, version: int, timeout_s: float) -> Batch:
        def try_to_take() -> Batch | None:
            with self._wake_on_change() as state:
                return state.take_batch(epoch, version, self._clock())

        return await self._retry_until(try_to_take, describe_batch_wait(version), timeout_s)

    async def take_batch_part(self, *, epoch: int, version: int, have: int, timeout_s: float) -> Batch:
        def try_to_take() -> Batch | None:
            with self._wake_on_change() as state:
                return state.take_batch(epoch, version, self._clock(), have=have, whole=False)

        return await self._retry_until(try_to_take, describe_batch_wait(version), timeout_s)

    async def release_batch(self, batch: Batch) -> None:
        with self._wake_on_change() as state:
            state.release_batch(batch)

    async def publish_version(self, *, epoch: int, version: int) -> None:
        self._state.publish_version(epoch, version)

    async def commit_checkpoint(self, *, epoch: int, version: int) -> None:
        with self._wake_on_change() as state:
            state.commit_checkpoint(epoch, version)

    async def rollback(self, version: int, *, accept_loss: bool = False) -> Resume:
        with self._wake_on_change() as state:
            return state.rollback(version, accept_loss=accept_loss)

    async def update_policy(self, policy: ReplayPolicy) -> None:
        with self._wake_on_change() as state:
            state.policy = policy

    async def set_staleness(self, *, epoch: int, staleness: int) -> None:
        with self._wake_on_change() as state:
            state.set_staleness(epoch, staleness)

    async def end_run(self) -> None:
        with self._wake_on_change() as state:
            state.ended = True

    async def stats(self) -> BufferStats:
        return self._state.stats()

    async def aclose(self) -> None:
        """Nothing to close."""

    @contextmanager
    def _wake_on_change(self) -> Iterator[BufferState]:
        before = self._state.stats()
        yield self._state
        if self._state.stats() != before:
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()  # the waiters keep the old one, which stays set

    async def _retry_until(
        self,
        attempt: Callable[[], T | None],
        waited_for: str,
        timeout_s: float,
        seconds_to_retry: Callable[[], float] = lambda: math.inf,
    ) -> T:
        """Return the first result that is neither None nor empty. Raises WaitTimeout.

        `seconds_to_retry`: seconds after which to retry even if nothing changes.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not (result := attempt()):
            remaining_s = deadline - loop.time()
            if remaining_s <= 0:
                raise WaitTimeout(waited_for, timeout_s)
            await self._wait_for_change(max(0.0, min(remaining_s, self._seconds_to_expiry(), seconds_to_retry())))
        return result

    async def _wait_for_change(self, max_s: float) -> None:
        changed = self._changed
        try:
            async with asyncio.timeout(max_s):
                await changed.wait()
        except TimeoutError:
            return

    def _seconds_to_expiry(self) -> float:
        """Seconds until the next lease expires; infinite if no lease is running."""
        now_s = self._clock()
        deadline_s = self._state.next_deadline_s(now_s)
        return math.inf if deadline_s is None else deadline_s - now_s


class InMemoryBoard:
    """`RunBoard` of one event loop. `clock` returns the time in seconds by which entries and claims expire."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._publisher: PublisherAddress | None = None
        self._replay: ReplayProgress | None = None
        self._beats: dict[str, tuple[ServerBeat, float]] = {}  # name -> heartbeat, end of its ttl
        self._counters: Counter[str] = Counter()
        self._claims: dict[str, tuple[str, float]] = {}  # job -> holder, end of the ttl
        self._evaluations: dict[int, Evaluation] = {}
        self._probe: Probe | None = None
        self._probe_changed = asyncio.Condition()

    async def set_publisher(self, address: PublisherAddress) -> None:
        if self._publisher is None or address.epoch >= self._publisher.epoch:
            self._publisher = address

    async def publisher_address(self) -> PublisherAddress | None:
        return self._publisher

    async def report_replay(self, progress: ReplayProgress) -> None:
        if self._replay is None or progress.epoch >= self._replay.epoch:
            self._replay = progress

    async def replay_progress(self) -> ReplayProgress | None:
        return self._replay

    async def announce_server(self, beat: ServerBeat, *, ttl_s: float) -> None:
        self._beats[beat.name] = (beat, self._clock() + ttl_s)

    async def live_servers(self) -> list[ServerBeat]:
        now_s = self._clock()
        return [beat for _, (beat, until_s) in sorted(self._beats.items()) if until_s > now_s]

    async def add_to_counter(self, name: str, amount: int) -> None:
        self._counters[name] += amount

    async def counters(self) -> dict[str, int]:
        return dict(self._counters)

    async def claim_job(self, job: str, holder: str, *, ttl_s: float) -> bool:
        now_s = self._clock()
        if job in self._claims:
            current_holder, until_s = self._claims[job]
            if current_holder != holder and until_s > now_s:
                return False
        self._claims[job] = (holder, now_s + ttl_s)
        return True

    async def put_evaluation(self, evaluation: Evaluation) -> None:
        self._evaluations.setdefault(evaluation.version, evaluation)

    async def evaluations(self) -> list[Evaluation]:
        return [self._evaluations[version] for version in sorted(self._evaluations)]

    async def put_probe(self, probe: Probe) -> None:
        async with self._probe_changed:
            if self._probe is None or probe.version >= self._probe.version:
                self._probe = probe
            self._probe_changed.notify_all()

    async def wait_for_probe(self, version: int, *, timeout_s: float) -> Probe:
        waited_for = f"the probe of version {version} from a rollout server"
        try:
            async with asyncio.timeout(timeout_s), self._probe_changed:
                await self._probe_changed.wait_for(lambda: self._probe is not None and self._probe.version >= version)
        except TimeoutError:
            raise WaitTimeout(waited_for, timeout_s) from None
        assert self._probe is not None
        if self._probe.version > version:
            raise WaitTimeout(waited_for, 0, f"The probe of version {self._probe.version} has already replaced it")
        return self._probe

    async def aclose(self) -> None:
        """Nothing to close."""
