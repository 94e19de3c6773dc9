"""The simulated buffer: `BufferState`, and the waiting and the cost of calls around it.

    SimulatedServer x N --admit, insert--> SimulatedBuffer <--take, release-- SimulatedTrainer

`BufferState`, the state of `InMemoryBuffer` and the reference of the Lua scripts, decides what is admitted, which
groups form a batch, what is too old, and what a restarted trainer gets again. This module only adds waiting (after
each change, blocked servers and the trainer retry), the time of an exchange, and the source of tasks.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Protocol

from async_grpo.errors import ConfigError, LeaseLost, RunEnded
from async_grpo.lab.simulate.context import SimulationContext
from async_grpo.lab.simulate.events import Action
from async_grpo.lab.simulate.group import SimulatedGroup, SimulatedGroups
from async_grpo.lab.simulate.timings import BufferTimings
from async_grpo.staleness import ORDERED_SELECTORS
from async_grpo.wire import Batch, ReleaseReason, Task, Ticket
from buffer.state import BufferState

TASKS_AHEAD = 2
"""Tasks kept waiting, as a multiple of the groups that the window has room for."""


class TicketWaiter(Protocol):
    """A server as the buffer sees it."""

    name: str
    groups: dict[int, SimulatedGroup]

    @property
    def need(self) -> tuple[float, int]:
        """Priority among waiting servers, the largest first. Unique."""
        ...

    def request_tickets(self) -> None:
        """Request tickets for all free slots."""

    def drop_expired(self, group: SimulatedGroup) -> None:
        """Stop generating a group that the buffer has ended."""


class BatchWaiter(Protocol):
    """The trainer as the buffer sees it."""

    def try_take(self) -> None:
        """Take the next batch, if one is needed and there."""


class SimulatedBuffer:
    """A `BufferState` whose callers wait in simulated time."""

    def __init__(self, context: SimulationContext) -> None:
        settings, timings = context.settings, context.timings
        self.state = BufferState(settings.policy, math.inf, settings.max_attempts)
        self.groups = SimulatedGroups(context)
        self.exchanges_s: list[float] = []
        """Seconds of each exchange with the buffer, its wait for earlier ones included."""
        self._context = context
        self._exchange_s = exchange_duration(timings.buffer, settings.servers)
        self._free_s = 0.0
        """When the exchanges so far have ended."""
        self._servers: Sequence[TicketWaiter] = ()
        self._trainer: BatchWaiter | None = None
        self._waiting: dict[str, TicketWaiter] = {}
        """Servers with free slots that got no ticket, by name."""
        self._blocker: tuple[int, int] | None = None
        """fifo: a version, and an unfinished group that its batch needs."""
        self._expired_before = self._stale_before = 0

    def connect(self, servers: Sequence[TicketWaiter], trainer: BatchWaiter) -> None:
        """Name the roles that retry after each change."""
        self._servers, self._trainer = servers, trainer

    def start_source(self) -> None:
        """Read the first task of a source that takes time for each; a fast one is read when tickets need it."""
        if self._context.timings.task_s:
            self._read_next_task()

    def exchange(self, action: Action) -> None:
        """Run the action once the buffer has processed the call. It processes one call after another."""
        if self._exchange_s == 0:
            action()
            return
        events = self._context.events
        self._free_s = max(events.now_s, self._free_s) + self._exchange_s
        self.exchanges_s.append(self._free_s - events.now_s)
        events.call_at(self._free_s, action)

    # Calls of servers

    def admit_groups(self, server: TicketWaiter, limit: int, slots: int) -> list[Ticket]:
        """Tickets for up to `limit` groups. If there are none (no room, no task, or room kept for other servers), the
        server waits, and requests tickets again when there may be some."""
        tickets = self._admit(server.name, limit, slots)
        if not tickets:
            self._waiting[server.name] = server
        return tickets

    def stop_waiting(self, server: TicketWaiter) -> None:
        """Remove a server that requests tickets again, or has died, from those that wait."""
        self._waiting.pop(server.name, None)
        self.state.waiting_servers.pop(server.name, None)

    def settle_group(self, group: SimulatedGroup) -> None:
        """Insert a judged group, or discard it as filtered."""
        assert group.ticket is not None
        filtered = self._context.timings.verifier.filtered
        try:
            if filtered and float(self._context.generator.random()) < filtered:
                self.state.discard_group(group.ticket, ReleaseReason.FILTERED)
                del self.groups[group.seq]
            else:
                self.state.insert_group(group.ticket, group.record())
                group.versions_before_insert = self.state.version - group.ticket.version
        except LeaseLost:
            self.groups.forget(group)
        self._wake_all()

    def give_back_group(self, group: SimulatedGroup) -> None:
        """Release a server's lease, so that any server can continue the group."""
        assert group.ticket is not None
        self.state.give_back(group.ticket)
        self._wake_all()

    def offer_room(self, server: TicketWaiter) -> None:
        """Let a server with a free slot request tickets, or the emptiest one where groups in flight are limited."""
        if self._context.settings.groups_in_flight is None:
            server.request_tickets()
        else:
            self.wake_servers()

    # Calls of the trainer

    def take_batch(self, epoch: int, version: int, *, have: int, whole: bool) -> Batch | None:
        """The batch of step `version` or a part of it, as `BufferState.take`; None if it is not there yet."""
        if self._is_blocked(version):
            return None
        settings, events, released = self._context.settings, self._context.events, self.state.released
        batch = self.state.take_batch(epoch, version, events.now_s, have=have, whole=whole)
        if batch is None and whole and settings.policy.selector == "fifo":
            self._blocker = self._find_blocker(version)

        if released[ReleaseReason.EXPIRED] != self._expired_before:
            self._expired_before = released[ReleaseReason.EXPIRED]
            if not settings.finishes_stale:
                # A server learns of it with its next heartbeat. They are lease_s / 3 apart: half of that in the mean.
                events.call_later(settings.lease_s / 6, self._drop_expired)
        if settings.recycles and released[ReleaseReason.STALE] != self._stale_before:
            self._stale_before = released[ReleaseReason.STALE]
            self._recycle_stale()
        if batch is not None or settings.policy.selector not in ORDERED_SELECTORS:
            self.wake_servers()
        return batch

    def release_batch(self, batch: Batch) -> None:
        """End the groups of a trained batch, or make them READY again until their last use."""
        self.state.release_batch(batch)
        settings, can_crash = self._context.settings, self._context.timings.faults.trainer_every_s > 0
        # A trainer that restarts gets the batches since its last checkpoint again, so their groups must stay.
        if settings.policy.max_uses == 1 and settings.checkpoint_steps == 0 and not can_crash:
            for group in batch.groups:
                self.groups.pop(group.seq, None)
        elif len(self.groups) > 4 * settings.policy.window.capacity:
            for seq in self._find_ended():
                del self.groups[seq]
        self.wake_servers()

    def set_staleness(self, epoch: int, staleness: int) -> None:
        """Change the effective S, which may admit more groups."""
        self.state.set_staleness(epoch, staleness)
        self.wake_servers()

    # Waiting

    def wake_servers(self) -> None:
        """Let waiting servers request tickets, one after another, until one gets none."""
        if self._context.settings.groups_in_flight is None:
            self._wake_neediest()
        else:
            self._wake_emptiest()

    def _wake_neediest(self) -> None:
        while self._waiting:
            server = max(self._waiting.values(), key=lambda waiting: waiting.need)
            held = len(server.groups)
            server.request_tickets()
            if len(server.groups) == held:
                return

    def _wake_emptiest(self) -> None:
        while True:
            server = min(self._servers, key=lambda each: len(each.groups))
            held = len(server.groups)
            server.request_tickets()
            if len(server.groups) == held:
                return

    def _wake_all(self) -> None:
        assert self._trainer is not None
        self._trainer.try_take()
        self.wake_servers()

    def _is_blocked(self, version: int) -> bool:
        """True if the group that kept this version from its batch is still unfinished, so that a take would get
        nothing. It saves most of the takes, which sort all groups."""
        if self._blocker is None or self._blocker[0] != version:
            return False
        slot = self.state.open.get(self._blocker[1])
        return slot is not None and slot.group is None

    def _find_blocker(self, version: int) -> tuple[int, int] | None:
        """fifo takes the P oldest groups; of the unfinished ones, the one with the most tokens to come."""
        oldest = heapq.nsmallest(self._context.settings.groups_per_step, self.state.open)
        unfinished = [seq for seq in oldest if self.state.open[seq].group is None and seq in self.groups]
        if not unfinished:
            return None
        left = {seq: max((sample.left for sample in self.groups[seq].samples), default=0.0) for seq in unfinished}
        return version, max(unfinished, key=left.__getitem__)

    # Admission

    def _admit(self, holder: str, limit: int, slots: int) -> list[Ticket]:
        state, most, reserved_since = self.state, self._context.settings.groups_in_flight, 0
        if most is not None:
            # The emptiest server requests here, so the buffer must keep no room for others.
            reserved_since = state.unserved_requests
            limit = min(1, most - sum(len(server.groups) for server in self._servers))
            if limit <= 0:
                return []
        if not self._context.timings.task_s and len(state.tasks) <= limit:
            self._put_tasks(max(limit, self._tasks_ahead))
        try:
            return state.admit_groups(
                limit, holder, self._context.events.now_s, slots=slots, reserved_since=reserved_since
            )
        except RunEnded:
            return []

    @property
    def _tasks_ahead(self) -> int:
        return TASKS_AHEAD * self._context.settings.policy.window.capacity

    def _read_next_task(self) -> None:
        if len(self.state.tasks) < self._tasks_ahead:
            self._put_tasks(1)
        self.wake_servers()
        self._context.events.call_later(self._context.timings.task_s, self._read_next_task, recurring=True)

    def _put_tasks(self, count: int) -> None:
        """Add `count` tasks without text."""
        first = self.state.tasks_put
        tasks = [Task(index=first + number, prompt="", prompt_tokens=b"", answer="") for number in range(count)]
        self.state.put_tasks(tasks)

    # Groups that ended

    def _drop_expired(self) -> None:
        for server in self._servers:
            for group in [group for seq, group in server.groups.items() if seq not in self.state.open]:
                server.drop_expired(group)

    def _find_ended(self) -> list[int]:
        """Sequences of the groups that no batch can contain any more."""
        state = self.state
        kept = {seq for step in state.steps.values() for seq in step.groups}
        return [seq for seq in self.groups if seq not in state.open and seq not in state.taken and seq not in kept]

    def _recycle_stale(self) -> None:
        """Generate groups that were too old again. Those that a server still generates follow once they have ended."""
        for group in [self.groups[seq] for seq in self._find_ended()]:
            if not group.missing:
                self.groups.forget(group)


def exchange_duration(cost: BufferTimings, servers: int) -> float:
    """Seconds of one exchange while the repeated calls of all servers take their share of the buffer's processor.

    Raises ConfigError if these alone need more than it has.
    """
    left = 1 - servers * cost.server_share
    if left <= 0:
        raise ConfigError(
            f"the heartbeats of {servers} servers alone need {1 - left:.2f} cores of the server that holds the "
            f"buffer (buffer.server_share {cost.server_share:g} each), which has one. Use fewer and larger servers"
        )
    return cost.exchange_s / left
