"""A rollout server without an engine: admit -> progress now and then -> insert or discard, with heartbeats.

Lanes wait for tickets; nothing waits for a lane. The heartbeat renews all leases a few times per lease. Ends when the
run ends.
"""

from __future__ import annotations

import asyncio
import random

from async_grpo.errors import LeaseLost, RunEnded, WaitTimeout
from async_grpo.wire import Group, Partial, ReleaseReason, Sample, Task, Ticket, VersionSpan, tokens_to_bytes
from buffer import ReplayBuffer
from tests.support.buffer_crashes.journal import Journal, digest_group
from tests.support.buffer_crashes.plan import LEASE_S

LANES = 2
TICKETS_AT_ONCE = 2
TASKS_AHEAD = 24
LONGEST_STEP_S = 0.006
MOST_STEPS = 4
TOKENS = 250
MANY_TOKENS = 30_000
"""Tokens of a large sample, 240 KB instead of 2 KB, so that the server is also killed during a long write."""
ADMIT_TIMEOUT_S = 0.5
DISCARDED = (ReleaseReason.FILTERED, ReleaseReason.UNVERIFIABLE)


class Producer:
    """A rollout server that generates random tokens."""

    def __init__(self, buffer: ReplayBuffer, journal: Journal, name: str, rng: random.Random) -> None:
        self._buffer = buffer
        self._journal = journal
        self._name = name
        self._rng = rng
        self._held: dict[int, Ticket] = {}
        self._version = 0

    async def run(self) -> None:
        """Generate groups until the run ends."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._renew_leases())
                for _ in range(LANES):
                    group.create_task(self._run_lane())
        except* RunEnded:
            self._journal.note("ended")

    async def _run_lane(self) -> None:
        while True:
            await self._put_tasks()
            try:
                limit = self._rng.randint(1, TICKETS_AT_ONCE)
                self._journal.note("admit?")
                tickets = await self._buffer.admit_groups(limit, holder=self._name, timeout_s=ADMIT_TIMEOUT_S)
            except WaitTimeout:
                continue
            for ticket in tickets:
                self._journal.note("admitted", seq=ticket.seq, attempt=ticket.attempt)
                self._held[ticket.seq] = ticket
            await asyncio.gather(*(self._process_ticket(ticket) for ticket in tickets))

    async def _put_tasks(self) -> None:
        stats = await self._buffer.stats()
        if stats.waiting < TASKS_AHEAD:
            await self._buffer.put_tasks([make_task(stats.tasks_put + ahead) for ahead in range(TASKS_AHEAD)])

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 4)
            tickets = list(self._held.values())
            if tickets:
                await self._buffer.renew_leases(tickets)

    async def _process_ticket(self, ticket: Ticket) -> None:
        try:
            await self._generate(ticket)
        except LeaseLost:
            self._journal.note("lost", seq=ticket.seq, attempt=ticket.attempt)
        finally:
            if self._held.get(ticket.seq) is ticket:
                del self._held[ticket.seq]

    async def _generate(self, ticket: Ticket) -> None:
        """Generate the rest of a group, after the samples of an earlier holder."""
        self._version = max(self._version, ticket.version)
        samples = [sample for sample in ticket.partial.samples if sample] if ticket.partial else []
        for _ in range(self._rng.randint(1, MOST_STEPS)):
            await asyncio.sleep(LONGEST_STEP_S * self._rng.random())
            samples.append(self._make_sample())
            if self._rng.random() < 0.5:
                partial = Partial(seq=ticket.seq, attempt=ticket.attempt, samples=[*samples, None])
                await self._buffer.save_partial(ticket, partial)
        await self._end_group(ticket, samples)

    async def _end_group(self, ticket: Ticket, samples: list[Sample]) -> None:
        lease = {"seq": ticket.seq, "attempt": ticket.attempt}
        chance = self._rng.random()
        if chance < 0.03:
            await self._buffer.give_back(ticket)
        elif chance < 0.12:
            reason = self._rng.choice(DISCARDED)
            self._journal.note("discard?", **lease, reason=reason.value)
            await self._buffer.discard_group(ticket, reason)
            self._journal.note("discarded", **lease, reason=reason.value)
        else:
            group = Group(seq=ticket.seq, attempt=ticket.attempt, task=ticket.task, samples=samples, server=self._name)
            facts = {**lease, "digest": digest_group(group), "oldest": group.oldest_version}
            self._journal.note("insert?", **facts)
            await self._buffer.insert_group(ticket, group)
            self._journal.note("inserted", **facts)

    def _make_sample(self) -> Sample:
        length = MANY_TOKENS if self._rng.random() < 0.02 else TOKENS
        return Sample(
            tokens=self._rng.randbytes(4 * length),
            logprobs=self._rng.randbytes(4 * length),
            spans=[VersionSpan(self._version, 0, length)],
            reward=1.0,
        )


def make_task(index: int) -> Task:
    """Return the task of an index, the same in all processes."""
    return Task(index=index, prompt=f"task {index}", prompt_tokens=tokens_to_bytes([index]), answer=str(index))
