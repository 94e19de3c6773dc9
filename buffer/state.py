"""The transitions of the buffer as plain synchronous code: the reference for the Lua scripts.

There is no clock and no waiting: `now_s` is passed in, and a call that cannot succeed yet returns nothing.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from async_grpo.staleness import ReplayPolicy
from async_grpo.wire import Batch, Group, Partial, ReleaseReason, Task, Ticket, encode
from buffer.base import BufferStats, Resume
from buffer.capacity import NO_QUOTA, MemoryQuota
from buffer.errors import checked_reason, checked_stream, fenced, forgotten, gap, lease_lost, run_ended, take_too_late
from buffer.fair_share import WaitingServer, fair_share
from buffer.groups import ActiveGroup, TakenStep, length_bucket
from buffer.holders import is_life_of
from buffer.selection import select, too_old_to_finish, too_old_to_train

ENDINGS_KEPT = 4096
"""Number of endings for which a repeated insert or discard is recognised."""


@dataclass(slots=True)
class BufferState:
    """All state of a run's buffer; the methods are those of `ReplayBuffer`."""

    policy: ReplayPolicy
    lease_s: float
    max_attempts: int
    epoch: int = 0
    version: int = 0
    committed: int = 0
    ended: bool = False
    tasks: list[Task] = field(default_factory=list)
    """WAITING."""
    admitted: int = 0
    inserted: int = 0
    used: int = 0
    """Groups taken, each as often as it was."""
    open: dict[int, ActiveGroup] = field(default_factory=dict)
    """INFLIGHT and READY."""
    taken: dict[int, ActiveGroup] = field(default_factory=dict)
    steps: dict[int, TakenStep] = field(default_factory=dict)
    released: Counter[str] = field(default_factory=Counter)
    lengths: Counter[tuple[str, int]] = field(default_factory=Counter)
    endings: OrderedDict[tuple[str, int, int], None] = field(default_factory=OrderedDict)
    ready_count: int = 0
    """Number of READY groups."""
    _no_lease_ends_before_s: float = 0.0
    """A lower bound on the deadlines of all leases; groups without a holder have deadline 0."""
    quota: MemoryQuota = NO_QUOTA
    waiting_servers: dict[str, WaitingServer] = field(default_factory=dict)
    """Servers that asked for groups and got none, by holder."""
    asks: int = 0
    """Number of requests for groups that got none."""
    held: Counter[str] = field(default_factory=Counter)
    """Number of leases of each holder."""
    _sizes: dict[int, int] = field(default_factory=dict)
    """Bytes of the payload of each finished group that is kept. Empty without a quota."""

    @property
    def tasks_put(self) -> int:
        """Number of tasks in the stream so far."""
        return self.admitted + len(self.tasks)

    @property
    def ready(self) -> dict[int, Group]:
        """READY groups, by sequence."""
        return {seq: slot.group for seq, slot in sorted(self.open.items()) if slot.group is not None}

    @property
    def kept(self) -> set[int]:
        """Groups whose payload is kept."""
        return set(self.ready).union(*(step.groups for step in self.steps.values()))

    @property
    def stored_bytes(self) -> int:
        """Bytes of the payloads that are kept."""
        kept = self.kept if self._sizes else ()
        self._sizes = {seq: self._sizes[seq] for seq in kept}
        return sum(self._sizes.values())

    def put_tasks(self, tasks: Sequence[Task]) -> int:
        checked_stream([task.index for task in tasks])
        known = self.tasks_put
        if tasks and tasks[0].index > known:
            raise gap(tasks[0].index, known)
        self.tasks += [task for task in tasks if task.index >= known]
        return self.tasks_put

    def admit(
        self, limit: int, holder: str, now_s: float, *, slots: int | None = None, kept_since: int = 0
    ) -> list[Ticket]:
        """The leased tickets; none if there is no task, or no room that is not kept for other servers.

        `kept_since`: value of `asks` since which room was kept for others. Those that have not asked since then no
        longer count.
        """
        if self.ended:
            raise run_ended()
        asking = WaitingServer(limit, max(limit, slots or 0))
        self.waiting_servers = {name: other for name, other in self.waiting_servers.items() if other.asked > kept_since}
        self.waiting_servers.pop(holder, None)
        others = [other.now_holding(self.held[name]) for name, other in self.waiting_servers.items()]
        unheld = self.unheld(now_s)
        room = len(unheld) + self._room()
        share = min(limit, fair_share(asking.now_holding(self.held[holder]), others, room))
        if share == 0:
            self.asks += 1
            self.waiting_servers[holder] = replace(asking, asked=self.asks)
            return []
        granted = unheld[:share]
        new = share - len(granted)
        for _ in range(new - max(0, self.policy.window.capacity - len(self.open) - len(self.taken))):
            self._end_as_stale(min(self.ready))
        granted += [self._admit_one() for _ in range(new)]
        return [self._lease(seq, holder, now_s) for seq in granted]

    def has_room(self, now_s: float) -> bool:
        """True if a group could be leased now, to whichever server."""
        return bool(self.unheld(now_s)) or self._room() > 0

    def expire_leases(self, name: str, life: int, now_s: float) -> None:
        """Expire the leases that the server `name` took in lives up to `life`."""
        for slot in self.open.values():
            if slot.group is None and is_life_of(slot.holder, name, upto=life):
                slot.deadline_s = min(slot.deadline_s, now_s)
                self._no_lease_ends_before_s = 0.0
        for holder in list(self.waiting_servers):
            if is_life_of(holder, name, upto=life):
                del self.waiting_servers[holder]

    def heartbeat(self, tickets: Sequence[Ticket], now_s: float) -> list[int]:
        held = [ticket.seq for ticket in tickets if self._holds(ticket)]
        for seq in held:
            self.open[seq].deadline_s = now_s + self.lease_s
        return [ticket.seq for ticket in tickets if not self._holds(ticket)]

    def progress(self, ticket: Ticket, partial: Partial, now_s: float) -> None:
        if not self._holds(ticket):
            raise lease_lost(ticket)
        slot = self.open[ticket.seq]
        slot.partial, slot.longest = partial, partial.longest
        slot.begun = max(slot.begun, partial.oldest_version or 0)
        slot.deadline_s = now_s + self.lease_s

    def give_back(self, ticket: Ticket, *, strike: bool = False) -> None:
        if self._holds(ticket):
            slot = self.open[ticket.seq]
            slot.strikes += strike
            slot.deadline_s = self._no_lease_ends_before_s = 0.0
            self._unhold(slot)

    def insert(self, ticket: Ticket, group: Group) -> None:
        if self._holds(ticket):
            slot = self.open[ticket.seq]
            self._unhold(slot)
            slot.group, slot.partial, slot.longest = group, None, group.longest
            self.inserted += 1
            self.ready_count += 1
            if self.quota.room_bytes:
                self._sizes[ticket.seq] = len(encode(group))
        elif not self._inserted_before(ticket):
            raise lease_lost(ticket)

    def discard(self, ticket: Ticket, reason: ReleaseReason) -> None:
        checked_reason(reason)
        if self._holds(ticket):
            self._release(ticket.seq, reason, how="discard")
        elif ("discard", ticket.seq, ticket.attempt) not in self.endings:
            raise lease_lost(ticket)

    def take(self, epoch: int, version: int, now_s: float, *, have: int = 0, whole: bool = True) -> Batch | None:
        """The groups of the step after the first `have`, which the caller has: all of them, or, if not `whole`, as many
        as may be taken now. None if they are not READY yet."""
        self._fence(epoch)
        step = self.steps.get(version)
        if step and (not step.missing or (not whole and len(step.groups) > have)):
            return step.batch(epoch, version, have)
        if step is None and version < self.committed:
            raise take_too_late(version, self.committed)
        if self.ended:
            raise run_ended()
        self.unheld(now_s)
        self._end_what_is_too_old(version)
        missing = step.missing if step else self.policy.window.groups_per_step
        least = 1 if self.policy.walks and not whole else missing
        if not self._may_sample(least, begun=step is not None):
            return None
        open_groups = [(seq, slot.group is not None) for seq, slot in sorted(self.open.items())]
        chosen = select(self.policy, version, open_groups, missing)
        return self._deliver(epoch, version, chosen, have) if len(chosen) >= least else None

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

    def rollback(self, version: int, *, accept_loss: bool = False) -> Resume:
        lost_steps = max(0, self.committed - version)
        if lost_steps and not accept_loss:
            raise forgotten(version, self.committed)
        if lost_steps:
            self._restart_at(version)
        for past in self._steps_below(version):
            self._settle(past)
        if version * self.policy.window.groups_per_step < self.policy.window.horizon:
            self.ended = False
        self.version = max(self.version, version)
        self.epoch += 1
        return Resume(self.epoch, self.version, lost_steps)

    def set_staleness(self, epoch: int, staleness: int) -> None:
        self._fence(epoch)
        self.policy = self.policy.with_staleness(staleness)

    def stats(self) -> BufferStats:
        window = self.policy.window
        return BufferStats(
            epoch=self.epoch,
            version=self.version,
            tasks_put=self.tasks_put,
            waiting=len(self.tasks),
            inflight=len(self.open) - self.ready_count,
            ready=self.ready_count,
            taken=len(self.taken),
            admitted=self.admitted,
            released={reason.value: self.released[reason.value] for reason in ReleaseReason},
            released_by_length={f"{reason}:{longest}": count for (reason, longest), count in self.lengths.items()},
            max_staleness=window.max_staleness,
            staleness=window.in_force,
            groups_per_step=window.groups_per_step,
            horizon=window.horizon,
            selector=self.policy.selector,
            selector_window=self.policy.selector_window,
            inserted=self.inserted,
            used=self.used,
            ended=self.ended,
            kept=len(self.kept),
            stored_bytes=self.stored_bytes,
            room_bytes=self.quota.room_bytes,
            group_bytes=self.quota.group_bytes,
        )

    def unheld(self, now_s: float) -> list[int]:
        """Sequences without a holder, lowest first. Groups without attempts left end as failed, and those whose partial
        is too old to continue as expired."""
        if now_s < self._no_lease_ends_before_s:
            return []
        held = {seq: slot.deadline_s for seq, slot in self.open.items() if slot.group is None}
        over = [seq for seq, deadline_s in held.items() if deadline_s <= now_s]
        self._no_lease_ends_before_s = min(held.values(), default=math.inf)
        for seq in over:
            slot = self.open[seq]
            if slot.strikes + (slot.deadline_s > 0) >= self.max_attempts:
                self._release(seq, ReleaseReason.FAILED, how=None)
            elif slot.partial is not None and too_old_to_finish(self.policy, self.version, slot.begun):
                self._release(seq, ReleaseReason.EXPIRED, how=None)
        return sorted(seq for seq in over if seq in self.open)

    def next_deadline_s(self, now_s: float) -> float | None:
        """When the next lease expires; None if none is running."""
        running = [slot.deadline_s for slot in self.open.values() if slot.group is None and slot.deadline_s > now_s]
        return min(running, default=None)

    def _room(self) -> int:
        """Number of new groups that may be admitted.

        Where the ratio of uses to inserts is limited, a full buffer evicts its oldest READY groups for them.
        """
        window, rate = self.policy.window, self.policy.rate
        active = len(self.open) + len(self.taken)
        inflight = len(self.open) - self.ready_count
        balance = rate.insertable(
            inserts=self.inserted + inflight, uses=self.used, size=active, needed_size=self.policy.size_to_take
        )
        room = min(len(self.tasks), balance)
        if self.quota.room_bytes:
            room = min(room, self.quota.free_groups(self.stored_bytes, inflight))
        free = max(0, window.capacity - active)
        if rate.limits:
            return max(0, min(room, free + self.ready_count))
        room = min(room, free)
        if self.used + active + room > window.horizon:
            unused = sum(slot.uses == 0 for slot in (self.open | self.taken).values())
            room = min(room, window.horizon - self.used - unused)
        return max(0, room)

    def _admit_one(self) -> int:
        seq = self.admitted
        self.open[seq] = ActiveGroup(task=self.tasks.pop(0), begun=self.version)
        self.admitted += 1
        return seq

    def _lease(self, seq: int, holder: str, now_s: float) -> Ticket:
        slot = self.open[seq]
        slot.strikes += slot.deadline_s > 0
        slot.attempt += 1
        self._unhold(slot)
        slot.holder = holder
        self.held[holder] += 1
        slot.deadline_s = now_s + self.lease_s
        self._no_lease_ends_before_s = min(self._no_lease_ends_before_s, slot.deadline_s)
        if slot.partial is None:
            slot.begun = self.version  # nothing is left of earlier attempts
        return Ticket(
            seq=seq,
            task=slot.task,
            version=slot.begun,
            epoch=self.epoch,
            attempt=slot.attempt,
            holder=holder,
            lease_s=self.lease_s,
            partial=slot.partial,
            strikes=slot.strikes,
        )

    def _restart_at(self, version: int) -> None:
        """Start generation again at `version`, which is below `committed`.

        Everything that the weights after `version` have generated goes: those weights are lost, and a group that is
        younger than the step that trains it would have a negative age.
        """
        for seq, slot in list(self.open.items()):
            if slot.group is None:
                self._release(seq, ReleaseReason.EXPIRED, how=None)
            else:
                self._end_as_stale(seq)
        for seq in list(self.taken):
            self._release(seq, ReleaseReason.STALE, how="insert")
        forgotten_groups = (self.committed - version) * self.policy.window.groups_per_step
        self.used -= forgotten_groups + sum(len(step.groups) for step in self.steps.values())
        if self.policy.rate.limits:  # else nothing would be admitted for as long as the ratio has room
            self.inserted = round(self.used / self.policy.rate.samples_per_insert)
        self.steps.clear()
        self.committed = self.version = version

    def _may_sample(self, least: int, *, begun: bool) -> bool:
        """Whether `least` groups may be taken now. A step that was begun may always be finished."""
        if begun:
            return self.ready_count >= least
        window, policy = self.policy.window, self.policy
        size = max(least, min(policy.min_ready, window.horizon - self.used))
        balanced = policy.rate.may_sample(window.groups_per_step, inserts=self.inserted, uses=self.used)
        return self.ready_count >= size and balanced

    def _deliver(self, epoch: int, version: int, seqs: list[int], have: int) -> Batch:
        step = self.steps.setdefault(version, TakenStep(epoch, 0, self.policy.window.groups_per_step))
        step.epoch = epoch
        step.mask_below = max(step.mask_below, self.policy.mask_below(version))  # retuned between two parts
        for seq in seqs:
            slot = self.taken[seq] = self.open.pop(seq)
            self.ready_count -= 1
            slot.uses += 1
            assert slot.group is not None
            step.groups[seq] = slot.group
        self.used += len(seqs)
        return step.batch(epoch, version, have)

    def _holds(self, ticket: Ticket) -> bool:
        """Whether the ticket's holder has the lease; an expired lease counts until another holder takes over."""
        slot = self.open.get(ticket.seq)
        return slot is not None and slot.group is None and slot.deadline_s > 0 and slot.attempt == ticket.attempt

    def _unhold(self, slot: ActiveGroup) -> None:
        """Nobody holds the group any more; no effect if nobody did."""
        if slot.holder:
            self.held[slot.holder] -= 1
            slot.holder = ""

    def _inserted_before(self, ticket: Ticket) -> bool:
        slot = self.open.get(ticket.seq) or self.taken.get(ticket.seq)
        if slot is not None:
            return slot.group is not None and slot.attempt == ticket.attempt
        return ("insert", ticket.seq, ticket.attempt) in self.endings

    def _steps_below(self, version: int) -> list[int]:
        return [step for step in self.steps if step < version]

    def _settle(self, version: int) -> None:
        """The groups of a step were trained, which counts once: TAKEN -> RELEASED(trained), or READY again."""
        step = self.steps.get(version)
        if step is None or step.settled:
            return
        step.settled = True
        for seq in step.groups:
            if self.taken[seq].uses >= self.policy.max_uses:
                self._release(seq, ReleaseReason.TRAINED, how="insert")
            else:
                self.open[seq] = self.taken.pop(seq)
                self.ready_count += 1

    def _end_what_is_too_old(self, version: int) -> None:
        for seq, slot in list(self.open.items()):
            if slot.group is None:
                if too_old_to_finish(self.policy, version, slot.begun):
                    self._release(seq, ReleaseReason.EXPIRED, how=None)
            elif too_old_to_train(self.policy, version, slot.group):
                self._end_as_stale(seq)

    def _end_as_stale(self, seq: int) -> None:
        """Release a READY group as stale, or as trained if it was trained before."""
        used = self.open[seq].uses > 0
        self._release(seq, ReleaseReason.TRAINED if used else ReleaseReason.STALE, how="insert")

    def _release(self, seq: int, reason: ReleaseReason, *, how: str | None) -> None:
        """Release a group, in this one place. A repeated call `how` is recognised from now on."""
        slot = self.open.pop(seq, None)
        if slot is None:
            slot = self.taken.pop(seq)
        elif slot.group is not None:
            self.ready_count -= 1
        self._unhold(slot)
        self.released[reason.value] += 1
        if slot.longest:
            self.lengths[reason.value, length_bucket(slot.longest)] += 1
        if how is not None:
            self.endings[how, seq, slot.attempt] = None
            if len(self.endings) > ENDINGS_KEPT:
                self.endings.popitem(last=False)

    def _fence(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise fenced(epoch, self.epoch)
