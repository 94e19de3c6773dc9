"""The simulated buffer: `BufferState`, plus waiting and the cost of calls.

    SimulatedServer x N --admit, insert--> SimulatedBuffer <--take, release-- SimulatedTrainer

`BufferState` is the state of `InMemoryBuffer` and the reference for the Lua scripts. It decides what is admitted, which
groups form a batch, which are too old, and which batches a restarted trainer gets again. This module only adds:

- waiting: after each change, blocked servers and the trainer retry
- the time of an exchange
- the task source
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
"""Tasks that the source keeps available, as a multiple of the window's capacity."""


class TicketWaiter(Protocol):
    """A server, as seen from the buffer."""

    name: str
    groups: dict[int, SimulatedGroup]

    @property
    def priority(self) -> tuple[float, int]:
        """Priority among waiting servers, the largest first. Unique."""
        ...

    def request_tickets(self) -> None:
        """Request tickets for all free slots."""

    def abandon_expired_group(self, group: SimulatedGroup) -> None:
        """Stop generating a group that the buffer has ended."""


class BatchWaiter(Protocol):
    """The trainer, as seen from the buffer."""

    def try_take(self) -> None:
        """Take the next batch if one is needed and ready."""


class SimulatedBuffer:
    """A `BufferState` whose callers wait in simulated time."""

    def __init__(self, context: SimulationContext) -> None:
        settings = context.settings
        timings = context.timings
        self.state = BufferState(settings.policy, math.inf, settings.max_attempts)
        self.groups = SimulatedGroups(context)
        self.exchanges_s: list[float] = []
        """Seconds of each exchange, including its wait for earlier ones."""
        self._context = context
        self._exchange_s = exchange_duration(timings.buffer, settings.servers)
        self._free_at_s = 0.0
        """Time at which all exchanges so far have ended."""
        self._servers: Sequence[TicketWaiter] = ()
        self._trainer: BatchWaiter | None = None
        self._waiting: dict[str, TicketWaiter] = {}
        """Servers with free slots that got no ticket, by name."""
        self._blocker: tuple[int, int] | None = None
        """fifo: a version, and the sequence number of an unfinished group that its batch needs."""
        self._handled_expired = 0
        self._handled_stale = 0

    def connect(self, servers: Sequence[TicketWaiter], trainer: BatchWaiter) -> None:
        """Set the roles that retry after each change."""
        self._servers = servers
        self._trainer = trainer

    def start_source(self) -> None:
        """Start a task source that takes time per task. A fast source is read when tickets need it."""
        if self._context.timings.task_s:
            self._read_next_task()

    def schedule_exchange(self, action: Action) -> None:
        """Run the action once the buffer has processed a call. It processes one call after another."""
        if self._exchange_s == 0:
            action()
            return
        events = self._context.events
        self._free_at_s = max(events.now_s, self._free_at_s) + self._exchange_s
        self.exchanges_s.append(self._free_at_s - events.now_s)
        events.call_at(self._free_at_s, action)

    # Calls of servers

    def admit_groups(self, server: TicketWaiter, limit: int, slots: int) -> list[Ticket]:
        """Admit up to `limit` groups.

        If none is admitted (no room, no task, or room reserved for other servers), the server is noted as waiting and
        retries when there may be tickets.
        """
        tickets = self._admit(server.name, limit, slots)
        if not tickets:
            self._waiting[server.name] = server
        return tickets

    def stop_waiting(self, server: TicketWaiter) -> None:
        """Remove a server that requests tickets now, or has failed, from the waiting ones."""
        self._waiting.pop(server.name, None)
        self.state.waiting_servers.pop(server.name, None)

    def end_group(self, group: SimulatedGroup) -> None:
        """Insert a judged group, or discard it as filtered."""
        assert group.ticket is not None
        filtered = self._context.timings.verifier.filtered
        try:
            if filtered and float(self._context.generator.random()) < filtered:
                self.state.discard_group(group.ticket, ReleaseReason.FILTERED)
                del self.groups[group.seq]
            else:
                self.state.insert_group(group.ticket, group.to_wire_group())
                group.versions_until_insert = self.state.version - group.ticket.version
        except LeaseLost:
            self.groups.drop_untrained(group)
        self._wake_all()

    def give_back_group(self, group: SimulatedGroup) -> None:
        """End a server's lease, so that any server can continue the group."""
        assert group.ticket is not None
        self.state.give_back(group.ticket)
        self._wake_all()

    def offer_tickets(self, server: TicketWaiter) -> None:
        """Let a server with free slots request tickets; where groups in flight are limited, the emptiest server."""
        if self._context.settings.groups_in_flight is None:
            server.request_tickets()
        else:
            self.wake_servers()

    # Calls of the trainer

    def take_batch(self, epoch: int, version: int, *, have: int, whole: bool) -> Batch | None:
        """Take the batch of step `version`, or a part of it, like `BufferState.take_batch`. None if it is not ready."""
        if self._is_blocked(version):
            return None

        settings = self._context.settings
        batch = self.state.take_batch(epoch, version, self._context.events.now_s, have=have, whole=whole)
        if batch is None and whole and settings.policy.selector == "fifo":
            self._blocker = self._find_blocker(version)

        self._handle_outdated_groups()
        # The other selectors may end groups that are too old although they return no batch: that makes room, too.
        if batch is not None or settings.policy.selector not in ORDERED_SELECTORS:
            self.wake_servers()
        return batch

    def release_batch(self, batch: Batch) -> None:
        """End the groups of a trained batch, or make them READY again until their last use."""
        self.state.release_batch(batch)

        settings = self._context.settings
        can_crash = self._context.timings.faults.trainer_every_s > 0
        if settings.policy.max_uses == 1 and settings.checkpoint_steps == 0 and not can_crash:
            for group in batch.groups:
                self.groups.pop(group.seq, None)
        # A trainer that restarts gets the batches since its last checkpoint again, so their groups must stay. Look for
        # the others only now and then: the search visits all groups.
        elif len(self.groups) > 4 * settings.policy.window.capacity:
            for seq in self._find_untrainable_groups():
                del self.groups[seq]
        self.wake_servers()

    def set_staleness(self, epoch: int, staleness: int) -> None:
        """Change the effective S. A larger one admits more groups."""
        self.state.set_staleness(epoch, staleness)
        self.wake_servers()

    # Waiting

    def wake_servers(self) -> None:
        """Let waiting servers request tickets, one after another, until one gets none."""
        if self._context.settings.groups_in_flight is None:
            self._wake_by_priority()
        else:
            self._wake_emptiest()

    def _wake_by_priority(self) -> None:
        while self._waiting:
            server = max(self._waiting.values(), key=lambda waiting: waiting.priority)
            groups_before = len(server.groups)
            server.request_tickets()
            if len(server.groups) == groups_before:
                return

    def _wake_emptiest(self) -> None:
        while True:
            server = min(self._servers, key=lambda candidate: len(candidate.groups))
            groups_before = len(server.groups)
            server.request_tickets()
            if len(server.groups) == groups_before:
                return

    def _wake_all(self) -> None:
        # The trainer first: a batch that it takes makes room in the window for the servers.
        assert self._trainer is not None
        self._trainer.try_take()
        self.wake_servers()

    def _is_blocked(self, version: int) -> bool:
        """True if the group that kept this version from its batch is still unfinished, so a take would return nothing.

        Saves most of the takes, which sort all groups.
        """
        if self._blocker is None:
            return False
        blocked_version, seq = self._blocker
        if blocked_version != version:
            return False
        slot = self.state.open.get(seq)
        return slot is not None and slot.group is None

    def _find_blocker(self, version: int) -> tuple[int, int] | None:
        """Find the unfinished group with the most missing tokens among the P oldest, which fifo takes."""
        oldest = heapq.nsmallest(self._context.settings.groups_per_step, self.state.open)
        missing_tokens: dict[int, float] = {}
        for seq in oldest:
            if self.state.open[seq].group is None and seq in self.groups:
                missing_tokens[seq] = max((sample.remaining for sample in self.groups[seq].samples), default=0.0)
        if not missing_tokens:
            return None
        return version, max(missing_tokens, key=missing_tokens.__getitem__)

    # Admission

    def _admit(self, server_name: str, limit: int, slots: int) -> list[Ticket]:
        state = self.state
        max_in_flight = self._context.settings.groups_in_flight
        reserved_since = 0
        if max_in_flight is not None:
            # Only the emptiest server requests here, so the buffer must not reserve room for others.
            reserved_since = state.unserved_requests
            limit = min(1, max_in_flight - sum(len(server.groups) for server in self._servers))
            if limit <= 0:
                return []

        if not self._context.timings.task_s and len(state.tasks) <= limit:
            self._put_tasks(max(limit, self._tasks_ahead))
        try:
            return state.admit_groups(
                limit, server_name, self._context.events.now_s, slots=slots, reserved_since=reserved_since
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
        self._context.events.call_later(self._context.timings.task_s, self._read_next_task, background=True)

    def _put_tasks(self, count: int) -> None:
        """Add `count` tasks without text."""
        first = self.state.tasks_put
        tasks = [Task(index=first + number, prompt="", prompt_tokens=b"", answer="") for number in range(count)]
        self.state.put_tasks(tasks)

    # Groups that ended untrained

    def _handle_outdated_groups(self) -> None:
        """Handle groups that the last take has ended: expired while generated, or stale when they were READY."""
        settings = self._context.settings
        released = self.state.released

        if released[ReleaseReason.EXPIRED] != self._handled_expired:
            self._handled_expired = released[ReleaseReason.EXPIRED]
            if not settings.finishes_stale:
                # A server notices at its next heartbeat. They are lease_s / 3 apart: half of that on average.
                self._context.events.call_later(settings.lease_s / 6, self._abandon_expired_groups)

        if settings.regenerates_stale and released[ReleaseReason.STALE] != self._handled_stale:
            self._handled_stale = released[ReleaseReason.STALE]
            self._regenerate_stale_groups()

    def _abandon_expired_groups(self) -> None:
        for server in self._servers:
            expired = [group for seq, group in server.groups.items() if seq not in self.state.open]
            for group in expired:
                server.abandon_expired_group(group)

    def _regenerate_stale_groups(self) -> None:
        for seq in self._find_untrainable_groups():
            group = self.groups[seq]
            # A server still generates the others. Their lengths are reused when it ends them.
            if not group.unfinished_samples:
                self.groups.drop_untrained(group)

    def _find_untrainable_groups(self) -> list[int]:
        """Sequence numbers of the groups that no batch can contain any more."""
        state = self.state
        replayable = {seq for step in state.steps.values() for seq in step.groups}
        return [
            seq for seq in self.groups if seq not in state.open and seq not in state.taken and seq not in replayable
        ]


def exchange_duration(cost: BufferTimings, servers: int) -> float:
    """Seconds of one exchange, on a processor that also handles the periodic calls of all servers.

    Raises ConfigError if these calls alone need more than one processor.
    """
    free_fraction = 1 - servers * cost.server_share
    if free_fraction <= 0:
        raise ConfigError(
            f"the heartbeats of {servers} servers alone need {1 - free_fraction:.2f} cores of the buffer's process "
            f"(buffer.server_share {cost.server_share:g} each), which has one. Use fewer and larger servers"
        )
    return cost.exchange_s / free_fraction
