"""The transitions of the buffer as plain synchronous code: the reference for the Lua scripts.

    InMemoryBuffer, simulation --call, now_s--> BufferState
    RedisBuffer                --call--------> lua/*.lua, the same transitions

There is no clock and no waiting: `now_s` is passed in, and a call that cannot succeed yet returns nothing. Methods of
`ReplayBuffer` have the same names here. A group is in exactly one place:

    tasks     WAITING
    open      INFLIGHT (no `group` yet) and READY
    taken     TAKEN
    -         RELEASED; its payload stays in `steps` until a checkpoint contains the step
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
from buffer.errors import (
    check_consecutive,
    check_discard_reason,
    fenced_error,
    lease_lost_error,
    run_ended_error,
    steps_forgotten_error,
    stream_gap_error,
    take_too_late_error,
)
from buffer.fair_share import WaitingServer, fair_share
from buffer.groups import ActiveGroup, TakenStep, length_bucket
from buffer.holders import is_life_of
from buffer.selection import select_groups, too_old_to_finish, too_old_to_train

MAX_ENDINGS = 4096
"""Number of recent endings for which a repeated insert or discard is recognised."""


@dataclass(slots=True)
class BufferState:
    """All state of a run's buffer."""

    policy: ReplayPolicy
    lease_s: float
    max_attempts: int
    epoch: int = 0
    version: int = 0
    """Newest published version."""
    committed: int = 0
    """Newest version that a committed checkpoint contains."""
    ended: bool = False
    tasks: list[Task] = field(default_factory=list)
    """WAITING tasks."""
    admitted: int = 0
    inserted: int = 0
    used: int = 0
    """Number of uses: a group counts each time that it is taken."""
    open: dict[int, ActiveGroup] = field(default_factory=dict)
    """INFLIGHT and READY groups."""
    taken: dict[int, ActiveGroup] = field(default_factory=dict)
    steps: dict[int, TakenStep] = field(default_factory=dict)
    """Batches by step, until a committed checkpoint contains the step."""
    released: Counter[str] = field(default_factory=Counter)
    released_by_length: Counter[tuple[str, int]] = field(default_factory=Counter)
    endings: OrderedDict[tuple[str, int, int], None] = field(default_factory=OrderedDict)
    """(call, sequence, attempt) of recent endings."""
    ready_count: int = 0
    """Number of READY groups."""
    _no_lease_ends_before_s: float = -math.inf
    """A lower bound on all lease deadlines, which saves most of the searches; -inf if a group has no holder."""
    quota: MemoryQuota = NO_QUOTA
    waiting_servers: dict[str, WaitingServer] = field(default_factory=dict)
    """Servers whose last request got no group, by holder."""
    unserved_requests: int = 0
    """Number of requests that got no group."""
    lease_counts: Counter[str] = field(default_factory=Counter)
    """Number of leases per holder."""
    _sizes: dict[int, int] = field(default_factory=dict)
    """Payload bytes of the stored groups, and of some that are gone. Empty without a quota."""

    @property
    def tasks_put(self) -> int:
        """Number of tasks in the stream so far."""
        return self.admitted + len(self.tasks)

    @property
    def ready(self) -> dict[int, Group]:
        """READY groups, by sequence."""
        return {seq: active.group for seq, active in sorted(self.open.items()) if active.group is not None}

    @property
    def stored_groups(self) -> set[int]:
        """Groups whose payload is stored."""
        return set(self.ready).union(*(step.groups for step in self.steps.values()))

    @property
    def stored_bytes(self) -> int:
        """Payload bytes of the stored groups; 0 without a quota."""
        if not self._sizes:
            return 0
        return sum(self._sizes[seq] for seq in self.stored_groups)

    def put_tasks(self, tasks: Sequence[Task]) -> int:
        check_consecutive([task.index for task in tasks])
        next_index = self.tasks_put
        if tasks and tasks[0].index > next_index:
            raise stream_gap_error(tasks[0].index, next_index)
        self.tasks += [task for task in tasks if task.index >= next_index]
        return self.tasks_put

    def admit_groups(
        self, limit: int, holder: str, now_s: float, *, slots: int | None = None, reserved_since: int = 0
    ) -> list[Ticket]:
        """Return the leased tickets; none if there is no task, or no room that is not reserved for other servers.

        `reserved_since`: value of `unserved_requests` when the caller first saw room reserved for others, or 0. Servers
        without a request since then are presumed dead, and no room is reserved for them.
        """
        if self.ended:
            raise run_ended_error()

        request = WaitingServer(limit, max(limit, slots or 0))
        self.waiting_servers = {
            name: server for name, server in self.waiting_servers.items() if server.request_number > reserved_since
        }
        self.waiting_servers.pop(holder, None)
        others = [server.with_leases(self.lease_counts[name]) for name, server in self.waiting_servers.items()]

        available = self._reclaim_expired_leases(now_s)
        room = len(available) + self._new_group_room()
        share = min(limit, fair_share(request.with_leases(self.lease_counts[holder]), others, room))
        if share == 0:
            self.unserved_requests += 1
            self.waiting_servers[holder] = replace(request, request_number=self.unserved_requests)
            return []

        # Groups without a holder first: they are the oldest, and the next batch may wait for them.
        granted = available[:share]
        new_count = share - len(granted)
        free_slots = max(0, self.policy.window.capacity - len(self.open) - len(self.taken))
        for _ in range(new_count - free_slots):
            self._end_as_stale(min(self.ready))
        for _ in range(new_count):
            granted.append(self._admit_new_group())
        return [self._lease(seq, holder, now_s) for seq in granted]

    def has_room(self, now_s: float) -> bool:
        """True if a group could be leased now, to any server.

        Call it after `admit_groups` with the same `now_s`, which has ended the groups that no server may continue.
        """
        if now_s >= self._no_lease_ends_before_s:
            for active in self.open.values():
                if active.group is None and (active.deadline_s is None or active.deadline_s <= now_s):
                    return True
        return self._new_group_room() > 0

    def expire_leases(self, name: str, life: int, now_s: float) -> None:
        for active in self.open.values():
            if active.group is None and active.deadline_s is not None and is_life_of(active.holder, name, upto=life):
                active.deadline_s = min(active.deadline_s, now_s)
                self._no_lease_ends_before_s = -math.inf
        for holder in list(self.waiting_servers):
            if is_life_of(holder, name, upto=life):
                del self.waiting_servers[holder]

    def renew_leases(self, tickets: Sequence[Ticket], now_s: float) -> list[int]:
        lost = []
        for ticket in tickets:
            if self._is_leased(ticket):
                self.open[ticket.seq].deadline_s = now_s + self.lease_s
            else:
                lost.append(ticket.seq)
        return lost

    def save_partial(self, ticket: Ticket, partial: Partial, now_s: float) -> None:
        if not self._is_leased(ticket):
            raise lease_lost_error(ticket)
        active = self.open[ticket.seq]
        active.partial = partial
        active.longest = partial.longest
        active.start_version = max(active.start_version, partial.oldest_version or 0)
        active.deadline_s = now_s + self.lease_s

    def give_back(self, ticket: Ticket, *, count_as_expired: bool = False) -> None:
        if self._is_leased(ticket):
            active = self.open[ticket.seq]
            active.expired_leases += count_as_expired
            active.deadline_s = None
            self._no_lease_ends_before_s = -math.inf
            self._remove_holder(active)

    def insert_group(self, ticket: Ticket, group: Group) -> None:
        if self._is_leased(ticket):
            active = self.open[ticket.seq]
            self._remove_holder(active)
            active.group = group
            active.partial = None
            active.longest = group.longest
            self.inserted += 1
            self.ready_count += 1
            if self.quota.room_bytes:
                self._sizes[ticket.seq] = len(encode(group))
        elif not self._was_inserted(ticket):
            raise lease_lost_error(ticket)

    def discard_group(self, ticket: Ticket, reason: ReleaseReason) -> None:
        check_discard_reason(reason)
        if self._is_leased(ticket):
            self._release(ticket.seq, reason, call="discard")
        elif ("discard", ticket.seq, ticket.attempt) not in self.endings:
            raise lease_lost_error(ticket)

    def take_batch(self, epoch: int, version: int, now_s: float, *, have: int = 0, whole: bool = True) -> Batch | None:
        """Return the groups of the step after the first `have`, which the caller has; None if they are not READY yet.

        `whole`: all of them. Otherwise as many as may be taken now.
        """
        self._check_epoch(epoch)
        step = self.steps.get(version)
        if step is not None:
            has_new_groups = len(step.groups) > have
            if step.missing == 0 or (not whole and has_new_groups):
                return step.batch(epoch, version, have)

        # A delayed repetition of an old call would take groups that nobody trains.
        if step is None and version < self.committed:
            raise take_too_late_error(version, self.committed)
        # Only now: a step that is complete is delivered even after the end of the run.
        if self.ended:
            raise run_ended_error()

        self._reclaim_expired_leases(now_s)
        self._end_groups_too_old_for(version)

        missing = self.policy.window.groups_per_step if step is None else step.missing
        required = 1 if self.policy.preserves_ticket_order and not whole else missing
        if not self._can_take(required, is_started=step is not None):
            return None
        open_groups = [(seq, active.group is not None) for seq, active in sorted(self.open.items())]
        chosen = select_groups(self.policy, version, open_groups, missing)
        if len(chosen) < required:
            return None
        return self._deliver(epoch, version, chosen, have)

    def release_batch(self, batch: Batch) -> None:
        self._check_epoch(batch.epoch)
        self._mark_step_trained(batch.version)

    def publish_version(self, epoch: int, version: int) -> None:
        self._check_epoch(epoch)
        self.version = max(self.version, version)

    def commit_checkpoint(self, epoch: int, version: int) -> None:
        self._check_epoch(epoch)
        for step_version in self._steps_below(version):
            self._mark_step_trained(step_version)
            del self.steps[step_version]
        self.committed = max(self.committed, version)

        stored = self.stored_groups if self._sizes else set()
        self._sizes = {seq: size for seq, size in self._sizes.items() if seq in stored}

    def rollback(self, version: int, *, accept_loss: bool = False) -> Resume:
        lost_steps = max(0, self.committed - version)
        if lost_steps and not accept_loss:
            raise steps_forgotten_error(version, self.committed)
        if lost_steps:
            self._restart_at(version)

        # The checkpoint contains these steps, even if the last trainer died before it released them.
        for step_version in self._steps_below(version):
            self._mark_step_trained(step_version)

        if version * self.policy.window.groups_per_step < self.policy.window.horizon:
            self.ended = False
        self.version = max(self.version, version)
        self.epoch += 1
        return Resume(self.epoch, self.version, lost_steps)

    def set_staleness(self, epoch: int, staleness: int) -> None:
        self._check_epoch(epoch)
        self.policy = self.policy.with_staleness(staleness)

    def stats(self) -> BufferStats:
        window = self.policy.window
        by_length = {f"{reason}:{bucket}": count for (reason, bucket), count in self.released_by_length.items()}
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
            released_by_length=by_length,
            max_staleness=window.max_staleness,
            staleness=window.effective_staleness,
            groups_per_step=window.groups_per_step,
            horizon=window.horizon,
            selector=self.policy.selector,
            selector_window=self.policy.selector_window,
            inserted=self.inserted,
            used=self.used,
            ended=self.ended,
            kept=len(self.stored_groups),
            stored_bytes=self.stored_bytes,
            room_bytes=self.quota.room_bytes,
            group_bytes=self.quota.group_bytes,
        )

    def next_deadline_s(self, now_s: float) -> float | None:
        """Return the time at which the next lease expires; None if no lease is running."""
        running = []
        for active in self.open.values():
            if active.group is None and active.deadline_s is not None and active.deadline_s > now_s:
                running.append(active.deadline_s)
        return min(running, default=None)

    # Leases

    def _is_leased(self, ticket: Ticket) -> bool:
        """True if the ticket's lease is valid. An expired lease is, until another holder takes over."""
        active = self.open.get(ticket.seq)
        if active is None or active.group is not None:
            return False
        return active.deadline_s is not None and active.attempt == ticket.attempt

    def _reclaim_expired_leases(self, now_s: float) -> list[int]:
        """Return the sequences that can be leased again, lowest first.

        Groups without attempts left end as `failed`, those whose partial is too old to continue as `expired`.
        """
        if now_s < self._no_lease_ends_before_s:
            return []
        deadlines_s: dict[int, float] = {}
        for seq, active in self.open.items():
            if active.group is None:
                deadlines_s[seq] = -math.inf if active.deadline_s is None else active.deadline_s
        self._no_lease_ends_before_s = min(deadlines_s.values(), default=math.inf)

        available = []
        for seq in sorted(seq for seq, deadline_s in deadlines_s.items() if deadline_s <= now_s):
            active = self.open[seq]
            # `_lease` counts an expired lease only when the group is leased again; `give_back` has counted its own.
            has_expired = active.deadline_s is not None
            if active.expired_leases + has_expired >= self.max_attempts:
                self._release(seq, ReleaseReason.FAILED)
            elif active.partial is not None and too_old_to_finish(self.policy, self.version, active.start_version):
                self._release(seq, ReleaseReason.EXPIRED)
            else:
                available.append(seq)
        return available

    def _lease(self, seq: int, holder: str, now_s: float) -> Ticket:
        active = self.open[seq]
        if active.deadline_s is not None:
            active.expired_leases += 1
        active.attempt += 1
        self._remove_holder(active)
        active.holder = holder
        self.lease_counts[holder] += 1
        active.deadline_s = now_s + self.lease_s
        self._no_lease_ends_before_s = min(self._no_lease_ends_before_s, active.deadline_s)
        if active.partial is None:
            active.start_version = self.version  # nothing is left of earlier attempts, so it restarts on new weights
        return Ticket(
            seq=seq,
            task=active.task,
            version=active.start_version,
            epoch=self.epoch,
            attempt=active.attempt,
            holder=holder,
            lease_s=self.lease_s,
            partial=active.partial,
            expired_leases=active.expired_leases,
        )

    def _remove_holder(self, active: ActiveGroup) -> None:
        if active.holder is not None:
            self.lease_counts[active.holder] -= 1
            active.holder = None

    # Admission

    def _new_group_room(self) -> int:
        """Number of new groups that may be admitted.

        If the ratio of uses to inserts is limited, this includes slots of READY groups that can be evicted.
        """
        window = self.policy.window
        rate = self.policy.rate
        active_count = len(self.open) + len(self.taken)
        inflight = len(self.open) - self.ready_count

        allowed_inserts = rate.allowed_inserts(
            inserts=self.inserted + inflight,
            uses=self.used,
            size=active_count,
            needed_size=self.policy.ready_groups_needed,
        )
        room = min(len(self.tasks), allowed_inserts)
        if self.quota.room_bytes:
            room = min(room, self.quota.free_groups(self.stored_bytes, inflight))
        free_slots = max(0, window.capacity - active_count)
        if rate.limits:
            return max(0, min(room, free_slots + self.ready_count))
        room = min(room, free_slots)

        # Near the end of the run, admit no group that would not be trained. The sum over all active groups is slow, so
        # it is made only if the horizon may be the limit.
        if self.used + active_count + room > window.horizon:
            unused = sum(active.uses == 0 for active in (self.open | self.taken).values())
            room = min(room, window.horizon - self.used - unused)
        return max(0, room)

    def _admit_new_group(self) -> int:
        seq = self.admitted
        self.open[seq] = ActiveGroup(task=self.tasks.pop(0), start_version=self.version)
        self.admitted += 1
        return seq

    # Batches

    def _can_take(self, required: int, *, is_started: bool) -> bool:
        """True if `required` groups may be taken now. A step that was started may always be completed."""
        if is_started:
            return self.ready_count >= required
        policy = self.policy
        window = policy.window
        min_ready = max(required, min(policy.min_ready, window.horizon - self.used))
        if self.ready_count < min_ready:
            return False
        return policy.rate.allows_sample(window.groups_per_step, inserts=self.inserted, uses=self.used)

    def _deliver(self, epoch: int, version: int, seqs: list[int], have: int) -> Batch:
        step = self.steps.setdefault(version, TakenStep(epoch, 0, self.policy.window.groups_per_step))
        step.epoch = epoch
        # The policy may have been updated between two parts of the step.
        step.mask_below = max(step.mask_below, self.policy.mask_below(version))
        for seq in seqs:
            active = self.open.pop(seq)
            self.taken[seq] = active
            self.ready_count -= 1
            active.uses += 1
            assert active.group is not None
            step.groups[seq] = active.group
        self.used += len(seqs)
        return step.batch(epoch, version, have)

    def _was_inserted(self, ticket: Ticket) -> bool:
        """True if this attempt was inserted before, so that the call is a repetition."""
        active = self.open.get(ticket.seq) or self.taken.get(ticket.seq)
        if active is not None:
            return active.group is not None and active.attempt == ticket.attempt
        return ("insert", ticket.seq, ticket.attempt) in self.endings

    def _steps_below(self, version: int) -> list[int]:
        return [step_version for step_version in self.steps if step_version < version]

    def _mark_step_trained(self, version: int) -> None:
        """TAKEN -> RELEASED(trained) for the groups of a step, or READY again. No effect the second time."""
        step = self.steps.get(version)
        if step is None or step.is_trained:
            return
        step.is_trained = True
        for seq in step.groups:
            if self.taken[seq].uses >= self.policy.max_uses:
                self._release(seq, ReleaseReason.TRAINED, call="insert")
            else:
                self.open[seq] = self.taken.pop(seq)
                self.ready_count += 1

    # Endings

    def _restart_at(self, version: int) -> None:
        """Restart generation at `version`, which is below `committed`.

        Everything that later weights have generated ends: those weights are lost, and a group that is younger than the
        step that trains it would have a negative age.
        """
        for seq, active in list(self.open.items()):
            if active.group is None:
                self._release(seq, ReleaseReason.EXPIRED)
            else:
                self._end_as_stale(seq)
        for seq in list(self.taken):
            self._release(seq, ReleaseReason.STALE, call="insert")

        # Count as if the lost steps had never been taken. With a limited ratio, the inserts have to follow: otherwise
        # nothing would be admitted until the uses have caught up.
        lost_uses = (self.committed - version) * self.policy.window.groups_per_step
        self.used -= lost_uses + sum(len(step.groups) for step in self.steps.values())
        if self.policy.rate.limits:
            self.inserted = round(self.used / self.policy.rate.samples_per_insert)
        self.steps.clear()
        self.committed = version
        self.version = version

    def _end_groups_too_old_for(self, version: int) -> None:
        """End the groups that no batch from step `version` on may contain."""
        for seq, active in list(self.open.items()):
            if active.group is None:
                if too_old_to_finish(self.policy, version, active.start_version):
                    self._release(seq, ReleaseReason.EXPIRED)
            elif too_old_to_train(self.policy, version, active.group):
                self._end_as_stale(seq)

    def _end_as_stale(self, seq: int) -> None:
        """Release a READY group as stale, or as trained if it was trained before."""
        was_trained = self.open[seq].uses > 0
        self._release(seq, ReleaseReason.TRAINED if was_trained else ReleaseReason.STALE, call="insert")

    def _release(self, seq: int, reason: ReleaseReason, *, call: str | None = None) -> None:
        """Release a group; the only place where groups end.

        `call`: the holder's last call for this group ("insert" or "discard"), whose repetition is recognised.
        """
        active = self.open.pop(seq, None)
        if active is None:
            active = self.taken.pop(seq)
        elif active.group is not None:
            self.ready_count -= 1
        self._remove_holder(active)
        self.released[reason.value] += 1
        if active.longest:
            self.released_by_length[reason.value, length_bucket(active.longest)] += 1
        if call is not None:
            self.endings[call, seq, active.attempt] = None
            if len(self.endings) > MAX_ENDINGS:
                self.endings.popitem(last=False)

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise fenced_error(epoch, self.epoch)
