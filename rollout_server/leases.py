"""The groups in work on this server, and the heartbeat that keeps their leases.

The keeper waits for its timer only. A group whose lease was lost is dropped at once: another server
makes it, and what this one would insert would be refused.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import structlog

from async_grpo.errors import BufferFault, LeaseLost
from buffer.protocol import ReplayBuffer
from rollout_server.group_work import GroupWork

log = structlog.get_logger()


class Leases:
    """Groups in work, by ticket sequence."""

    def __init__(self, buffer: ReplayBuffer, *, every_s: float) -> None:
        self._buffer = buffer
        self._every_s = every_s
        self._works: dict[int, GroupWork] = {}
        self.lost = 0

    def __iter__(self) -> Iterator[GroupWork]:
        return iter(list(self._works.values()))

    def __len__(self) -> int:
        return len(self._works)

    def hold(self, work: GroupWork) -> None:
        """Take up a group; an earlier attempt at it that is still in work here is dropped."""
        if (earlier := self._works.get(work.ticket.seq)) is not None:
            self.drop(earlier)
        self._works[work.ticket.seq] = work

    def forget(self, work: GroupWork) -> None:
        """The group has ended here."""
        if self._works.get(work.ticket.seq) is work:
            del self._works[work.ticket.seq]

    def drop(self, work: GroupWork) -> None:
        """The lease was lost: stop working on the group."""
        self.forget(work)
        self.lost += 1
        log.warning("lease lost, group dropped", seq=work.ticket.seq, attempt=work.ticket.attempt)
        if work.doing is not None:
            work.doing.cancel()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.renew()

    async def renew(self) -> None:
        """One heartbeat; samples that have finished since the last one are stored on the way."""
        held = {work.ticket.seq: work for work in self if not work.settling}
        for work in held.values():
            if work.finished > work.stored:
                await self._store(work)
        lost = await self._buffer.heartbeat([work.ticket for work in held.values()])
        for work in (held[seq] for seq in lost if seq in held):
            if self._works.get(work.ticket.seq) is work and not work.settling:
                self.drop(work)

    async def hand_back(self, work: GroupWork) -> None:
        """Store what exists and end the lease, so that another server goes on at once."""
        self.forget(work)
        with contextlib.suppress(BufferFault):  # the lease or the run has ended: nothing to give back
            if any(work.samples):
                await self._buffer.progress(work.ticket, work.partial())
            await self._buffer.give_back(work.ticket)

    async def _store(self, work: GroupWork) -> None:
        finished = work.finished
        try:
            await self._buffer.progress(work.ticket, work.partial())
        except LeaseLost:
            if not work.settling:
                self.drop(work)
        else:
            work.stored = finished
