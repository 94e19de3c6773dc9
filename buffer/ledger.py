"""The transitions of the buffer as plain synchronous code: the reference that the Lua scripts repeat.

No clock and no waiting: `now_s` is passed in, and what cannot be done yet returns nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from async_grpo.staleness.window import StalenessWindow, can_admit
from async_grpo.wire import Batch, Group, Partial, ReleaseReason, Task, Ticket
from buffer.faults import checked_reason, checked_stream, fenced, forgotten, gap, lease_lost, run_ended
from buffer.protocol import BufferStats, Resume
from buffer.selection import select_fifo

ENDINGS_KEPT = 4096
"""A repeated insert or discard is recognised for this many endings."""


@dataclass(slots=True)
class Slot:
    """An active group: INFLIGHT while `group` is None. `deadline_s` 0: given back, nobody holds it."""

    task: Task
    version: int
    attempt: int = 0
    strikes: int = 0
    deadline_s: float = 0.0
    partial: Partial | None = None
    group: Group | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """A batch that was taken, until a checkpoint contains it."""

    epoch: int
    groups: dict[int, Group]


@dataclass(slots=True)
class Ledger:
    """All state of a run's buffer; the methods are those of `ReplayBuffer`."""

    window: StalenessWindow
    lease_s: float
    max_attempts: int
    epoch: int = 0
    version: int = 0
    committed: int = 0
    ended: bool = False
    tasks: list[Task] = field(default_factory=list)
    """WAITING."""
    admitted: int = 0
    open: dict[int, Slot] = field(default_factory=dict)
    """INFLIGHT and READY, in order of sequence: sequences are only ever appended."""
    taken: dict[int, Slot] = field(default_factory=dict)
    steps: dict[int, Step] = field(default_factory=dict)
    released: Counter[str] = field(default_factory=Counter)
    endings: OrderedDict[tuple[str, int, int], None] = field(default_factory=OrderedDict)

    @property
    def tasks_put(self) -> int:
        """Length of the stream so far."""
        return self.admitted + len(self.tasks)

    def put_tasks(self, tasks: Sequence[Task]) -> int:
        checked_stream([task.index for task in tasks])
        known = self.tasks_put
        if tasks and tasks[0].index > known:
            raise gap(tasks[0].index, known)
        self.tasks += [task for task in tasks if task.index >= known]
        return self.tasks_put

    def admit(self, limit: int, holder: str, now_s: float) -> list[Ticket]:
        """Tickets, or none if there is no room or no task."""
        if self.ended:
            raise run_ended()
        again = self.expired(now_s)[:limit]
        fresh = [self._admit_one() for _ in range(min(limit - len(again), self._admissible()))]
        return [self._lease(seq, holder, now_s) for seq in again + fresh]

    def heartbeat(self, tickets: Sequence[Ticket], now_s: float) -> list[int]:
        held = [ticket.seq for ticket in tickets if self._holds(ticket)]
        for seq in held:
            self.open[seq].deadline_s = now_s + self.lease_s
        return [ticket.seq for ticket in tickets if not self._holds(ticket)]

    def progress(self, ticket: Ticket, partial: Partial, now_s: float) -> None:
        if not self._holds(ticket):
            raise lease_lost(ticket)
        self.open[ticket.seq].partial = partial
        self.open[ticket.seq].deadline_s = now_s + self.lease_s

    def give_back(self, ticket: Ticket) -> None:
        if self._holds(ticket):
            self.open[ticket.seq].deadline_s = 0.0

    def insert(self, ticket: Ticket, group: Group) -> None:
        if self._holds(ticket):
            slot = self.open[ticket.seq]
            slot.group, slot.partial = group, None
        elif not self._inserted_before(ticket):
            raise lease_lost(ticket)

    def discard(self, ticket: Ticket, reason: ReleaseReason) -> None:
        checked_reason(reason)
        if self._holds(ticket):
            self._release(ticket.seq, reason, how="discard")
        elif ("discard", ticket.seq, ticket.attempt) not in self.endings:
            raise lease_lost(ticket)

    def take(self, epoch: int, version: int, now_s: float) -> Batch | None:
        """The batch, or None if it is not complete yet."""
        self._fence(epoch)
        if step := self.steps.get(version):
            groups = list(step.groups.values())
            return Batch(epoch=epoch, version=version, groups=groups, replayed=step.epoch < epoch)
        if self.ended:
            raise run_ended()
        self.expired(now_s)
        facts = [(seq, slot.group.oldest_version if slot.group else None) for seq, slot in self.open.items()]
        selection = select_fifo(self.window, trainer_version=version, open_groups=facts)
        for seq in selection.stale:
            self._release(seq, ReleaseReason.STALE, how="insert")
        if not selection.chosen:
            return None
        return self._deliver(epoch, version, selection.chosen)

    def release(self, batch: Batch) -> None:
        self._fence(batch.epoch)
        self._settle(batch.version)

    def publish_version(self, epoch: int, version: int) -> None:
        self._fence(epoch)
        self.version = max(self.version, version)

    def commit_checkpoint(self, epoch: int, version: int) -> None:
        self._fence(epoch)
        for past in self._steps_below(version):
            self._settle(past)
            del self.steps[past]
        self.committed = max(self.committed, version)

    def rollback(self, version: int) -> Resume:
        if version < self.committed:
            raise forgotten(version, self.committed)
        for past in self._steps_below(version):
            self._settle(past)
        if version * self.window.groups_per_step < self.window.horizon:
            self.ended = False
        self.version = max(self.version, version)
        self.epoch += 1
        return Resume(self.epoch, self.version)

    def stats(self) -> BufferStats:
        ready = sum(slot.group is not None for slot in self.open.values())
        return BufferStats(
            epoch=self.epoch,
            version=self.version,
            tasks_put=self.tasks_put,
            waiting=len(self.tasks),
            inflight=len(self.open) - ready,
            ready=ready,
            taken=len(self.taken),
            admitted=self.admitted,
            released={reason.value: self.released[reason.value] for reason in ReleaseReason},
            max_staleness=self.window.max_staleness,
            groups_per_step=self.window.groups_per_step,
            horizon=self.window.horizon,
            ended=self.ended,
            kept=ready + sum(len(step.groups) for step in self.steps.values()),
        )

    def expired(self, now_s: float) -> list[int]:
        """Sequences that nobody holds, lowest first; those without attempts left are released as failed."""
        over = [seq for seq, slot in self.open.items() if slot.group is None and slot.deadline_s <= now_s]
        for seq in over:
            slot = self.open[seq]
            if slot.strikes + (slot.deadline_s > 0) >= self.max_attempts:
                self._release(seq, ReleaseReason.FAILED, how=None)
        return [seq for seq in over if seq in self.open]

    def next_deadline_s(self, now_s: float) -> float | None:
        """When the next lease expires."""
        running = [slot.deadline_s for slot in self.open.values() if slot.group is None and slot.deadline_s > now_s]
        return min(running, default=None)

    def _admissible(self) -> int:
        released = self.released.total()
        discarded = released - self.released[ReleaseReason.TRAINED.value]
        room = can_admit(self.window, admitted=self.admitted, released=released, discarded=discarded)
        return min(room, len(self.tasks))

    def _admit_one(self) -> int:
        seq = self.admitted
        self.open[seq] = Slot(task=self.tasks.pop(0), version=self.version)
        self.admitted += 1
        return seq

    def _lease(self, seq: int, holder: str, now_s: float) -> Ticket:
        slot = self.open[seq]
        slot.strikes += slot.deadline_s > 0
        slot.attempt += 1
        slot.deadline_s = now_s + self.lease_s
        return Ticket(
            seq=seq,
            task=slot.task,
            version=slot.version,
            epoch=self.epoch,
            attempt=slot.attempt,
            holder=holder,
            lease_s=self.lease_s,
            partial=slot.partial,
        )

    def _deliver(self, epoch: int, version: int, seqs: list[int]) -> Batch:
        slots = {seq: self.open.pop(seq) for seq in seqs}
        self.taken |= slots
        groups = {seq: slot.group for seq, slot in slots.items() if slot.group is not None}
        self.steps[version] = Step(epoch, groups)
        return Batch(epoch=epoch, version=version, groups=list(groups.values()))

    def _holds(self, ticket: Ticket) -> bool:
        """An expired lease that nobody has taken over yet still belongs to its holder."""
        slot = self.open.get(ticket.seq)
        return slot is not None and slot.group is None and slot.deadline_s > 0 and slot.attempt == ticket.attempt

    def _inserted_before(self, ticket: Ticket) -> bool:
        slot = self.open.get(ticket.seq) or self.taken.get(ticket.seq)
        if slot is not None:
            return slot.group is not None and slot.attempt == ticket.attempt
        return ("insert", ticket.seq, ticket.attempt) in self.endings

    def _steps_below(self, version: int) -> list[int]:
        return [step for step in self.steps if step < version]

    def _settle(self, version: int) -> None:
        """TAKEN -> RELEASED(trained) for the groups of a step, once a group."""
        step = self.steps.get(version)
        for seq in step.groups if step else ():
            if seq in self.taken:
                self._release(seq, ReleaseReason.TRAINED, how="insert")

    def _release(self, seq: int, reason: ReleaseReason, *, how: str | None) -> None:
        """The one place where a group is released; a repetition of the call `how` is recognised from now on."""
        slot = self.open.pop(seq, None) or self.taken.pop(seq)
        self.released[reason.value] += 1
        if how is not None:
            self.endings[how, seq, slot.attempt] = None
            if len(self.endings) > ENDINGS_KEPT:
                self.endings.popitem(last=False)

    def _fence(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise fenced(epoch, self.epoch)
