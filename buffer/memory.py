"""`ReplayBuffer` in one process: the reference that the Redis one is held against."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from async_grpo.errors import Fenced, LeaseLost, RunEnded, WaitTimeout
from async_grpo.staleness.window import StalenessWindow, can_admit, is_stale
from async_grpo.wire import Batch, Group, Partial, ReleaseReason, Task, Ticket
from buffer.protocol import BufferStats, Resume


@dataclass(slots=True)
class _Entry:
    """An admitted group that has not ended (or is kept until the checkpoint)."""

    version: int
    attempt: int = 0
    deadline_s: float = 0.0
    strikes: int = 0
    partial: Partial | None = None
    group: Group | None = None


class InMemoryBuffer:
    """See `buffer.protocol.ReplayBuffer`; `clock` gives seconds."""

    def __init__(
        self,
        window: StalenessWindow,
        *,
        lease_s: float,
        max_attempts: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._window = window
        self._lease_s = lease_s
        self._max_attempts = max_attempts
        self._clock = clock
        self._tasks: list[Task] = []
        self._entries: dict[int, _Entry] = {}
        self._inflight: set[int] = set()
        self._ready: set[int] = set()
        self._taken: set[int] = set()
        self._log: dict[int, tuple[int, list[int]]] = {}
        self._discarded_attempts: set[tuple[int, int]] = set()
        self._released: Counter[ReleaseReason] = Counter()
        self._admitted = 0
        self._epoch = 0
        self._version = 0
        self._ended = False
        self._changed = asyncio.Condition()

    async def put_tasks(self, tasks: Sequence[Task]) -> int:
        first = tasks[0].index if tasks else 0
        if [task.index for task in tasks] != list(range(first, first + len(tasks))):
            raise ValueError(f"task indexes must follow each other without a gap, from {first}")
        if first > len(self._tasks):
            raise ValueError(f"tasks from {first} would leave a gap: the stream ends before {len(self._tasks)}")
        self._tasks.extend(tasks[len(self._tasks) - first :])
        await self._notify()
        return len(self._tasks)

    async def admit(self, limit: int, *, holder: str, timeout_s: float) -> list[Ticket]:
        deadline_s = time.monotonic() + timeout_s
        while True:
            if self._ended:
                raise RunEnded("the run is over: no more groups are admitted")
            seqs = self._expired()[:limit]
            seqs += [self._admit_new() for _ in range(min(limit - len(seqs), self._room()))]
            if seqs:
                return [self._lease(seq, holder) for seq in seqs]
            cause = "tasks" if len(self._tasks) <= self._admitted else "the staleness window"
            await self._wait(deadline_s, self._next_expiry_s(), WaitTimeout(cause, timeout_s))

    async def heartbeat(self, tickets: Sequence[Ticket]) -> list[int]:
        lost = []
        for ticket in tickets:
            if self._holds(ticket) and ticket.seq in self._inflight:
                self._entries[ticket.seq].deadline_s = self._clock() + self._lease_s
            else:
                lost.append(ticket.seq)
        return lost

    async def progress(self, ticket: Ticket, partial: Partial) -> None:
        entry = self._held(ticket)
        if ticket.seq not in self._inflight:
            raise _lost(ticket)
        entry.partial = partial
        entry.deadline_s = self._clock() + self._lease_s

    async def give_back(self, ticket: Ticket) -> None:
        if self._holds(ticket) and ticket.seq in self._inflight:
            self._entries[ticket.seq].deadline_s = 0.0
            await self._notify()

    async def insert(self, ticket: Ticket, group: Group) -> None:
        entry = self._held(ticket)
        if ticket.seq in self._inflight:
            self._inflight.remove(ticket.seq)
            self._ready.add(ticket.seq)
            entry.group, entry.partial = group, None
            await self._notify()

    async def discard(self, ticket: Ticket, reason: ReleaseReason) -> None:
        if (ticket.seq, ticket.attempt) in self._discarded_attempts:
            return
        self._held(ticket)
        if ticket.seq not in self._inflight:
            raise _lost(ticket)
        self._discarded_attempts.add((ticket.seq, ticket.attempt))
        self._discard(ticket.seq, reason)
        await self._notify()

    async def take(self, *, epoch: int, version: int, timeout_s: float) -> Batch:
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._fence(epoch)
            if version in self._log:
                logged_epoch, seqs = self._log[version]
                return self._batch(epoch, version, seqs, replayed=logged_epoch < epoch)
            if self._ended:
                raise RunEnded("the run is over: no more groups are delivered")
            seqs = self._oldest(version)
            if len(seqs) == self._window.groups_per_step:
                self._ready.difference_update(seqs)
                self._taken.update(seqs)
                self._log[version] = (epoch, seqs)
                return self._batch(epoch, version, seqs, replayed=False)
            ready = f"{len(self._ready)} groups are ready"
            missing = f"the {self._window.groups_per_step} oldest groups for step {version} ({ready})"
            await self._wait(deadline_s, None, WaitTimeout(missing, timeout_s, "Are the rollout servers running"))

    async def release(self, batch: Batch) -> None:
        self._fence(batch.epoch)
        for seq in self._log.get(batch.version, (0, []))[1]:
            if seq in self._taken:
                self._taken.remove(seq)
                self._released[ReleaseReason.TRAINED] += 1
        await self._notify()

    async def publish_version(self, *, epoch: int, version: int) -> None:
        self._fence(epoch)
        self._version = max(self._version, version)

    async def commit_checkpoint(self, *, epoch: int, version: int) -> None:
        self._fence(epoch)
        for logged in [step for step in self._log if step < version]:
            for seq in self._log.pop(logged)[1]:
                self._entries.pop(seq, None)

    async def rollback(self, version: int) -> Resume:
        self._epoch += 1
        if version * self._window.groups_per_step < self._window.horizon:
            self._ended = False
        await self._notify()
        return Resume(self._epoch, self._version)

    async def update_admission(self, window: StalenessWindow) -> None:
        self._window = window
        await self._notify()

    async def end(self) -> None:
        self._ended = True
        await self._notify()

    async def stats(self) -> BufferStats:
        return BufferStats(
            epoch=self._epoch,
            version=self._version,
            tasks_put=len(self._tasks),
            waiting=len(self._tasks) - self._admitted,
            inflight=len(self._inflight),
            ready=len(self._ready),
            taken=len(self._taken),
            admitted=self._admitted,
            released={reason.value: self._released[reason] for reason in ReleaseReason},
            max_staleness=self._window.max_staleness,
            groups_per_step=self._window.groups_per_step,
            horizon=self._window.horizon,
            ended=self._ended,
        )

    async def aclose(self) -> None:
        """Nothing is open."""

    def _room(self) -> int:
        released = sum(self._released.values())
        discarded = released - self._released[ReleaseReason.TRAINED]
        allowed = can_admit(self._window, admitted=self._admitted, released=released, discarded=discarded)
        return min(allowed, len(self._tasks) - self._admitted)

    def _admit_new(self) -> int:
        seq, self._admitted = self._admitted, self._admitted + 1
        self._entries[seq] = _Entry(self._version)
        self._inflight.add(seq)
        return seq

    def _lease(self, seq: int, holder: str) -> Ticket:
        entry = self._entries[seq]
        entry.strikes += entry.deadline_s > 0  # the lease before expired; one that was given back has 0
        entry.attempt += 1
        entry.deadline_s = self._clock() + self._lease_s
        return Ticket(
            seq=seq,
            task=self._tasks[seq],
            version=entry.version,
            epoch=self._epoch,
            attempt=entry.attempt,
            holder=holder,
            lease_s=self._lease_s,
            partial=entry.partial,
        )

    def _expired(self) -> list[int]:
        """Groups that wait for a new holder, oldest first; those that died too often end here as failed."""
        now_s, waiting = self._clock(), []
        for seq in sorted(self._inflight):
            entry = self._entries[seq]
            if entry.deadline_s > now_s:
                continue
            if entry.strikes + (entry.deadline_s > 0) >= self._max_attempts:
                self._discard(seq, ReleaseReason.FAILED)
            else:
                waiting.append(seq)
        return waiting

    def _next_expiry_s(self) -> float | None:
        deadlines = [self._entries[seq].deadline_s for seq in self._inflight]
        return max(0.0, min(deadlines) - self._clock()) if deadlines else None

    def _oldest(self, version: int) -> list[int]:
        """The first READY groups in ticket order, up to P; stale ones are released on the way."""
        picked: list[int] = []
        for seq in sorted(self._inflight | self._ready):
            group = self._entries[seq].group
            if group is None or len(picked) == self._window.groups_per_step:
                break
            if is_stale(self._window, trainer_version=version, oldest_version=group.oldest_version):
                self._discard(seq, ReleaseReason.STALE)
            else:
                picked.append(seq)
        return picked

    def _discard(self, seq: int, reason: ReleaseReason) -> None:
        self._inflight.discard(seq)
        self._ready.discard(seq)
        self._released[reason] += 1
        del self._entries[seq]

    def _batch(self, epoch: int, version: int, seqs: list[int], *, replayed: bool) -> Batch:
        groups = [group for seq in seqs if (group := self._entries[seq].group) is not None]
        return Batch(epoch=epoch, version=version, groups=groups, replayed=replayed)

    def _holds(self, ticket: Ticket) -> bool:
        entry = self._entries.get(ticket.seq)
        return entry is not None and entry.attempt == ticket.attempt

    def _held(self, ticket: Ticket) -> _Entry:
        if not self._holds(ticket):
            raise _lost(ticket)
        return self._entries[ticket.seq]

    def _fence(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise Fenced(f"epoch {epoch} is over: a newer trainer has taken over in epoch {self._epoch}")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, deadline_s: float, at_most_s: float | None, error: WaitTimeout) -> None:
        """Until something changes, or at_most_s. Raises `error` after the deadline."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise error
        try:
            async with asyncio.timeout(left_s if at_most_s is None else min(left_s, at_most_s)), self._changed:
                await self._changed.wait()
        except TimeoutError:
            return


def _lost(ticket: Ticket) -> LeaseLost:
    return LeaseLost(f"group {ticket.seq}: attempt {ticket.attempt} of {ticket.holder} no longer holds the lease")
