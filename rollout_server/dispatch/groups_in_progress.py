"""The groups in work on this server: renews their leases, stores their partials, and gives them back.

The heartbeat (`run`) and the storing (`run_storing`) wait for their timers only. A group whose lease is lost is dropped
at once: another server makes it, and the buffer would refuse what this one inserts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import structlog

from async_grpo.errors import BufferFault, LeaseLost
from async_grpo.wire import Partial
from buffer.base import ReplayBuffer
from rollout_server.dispatch.group_rollout import GroupRollout, tokens_of

log = structlog.get_logger()


class Leases:
    """Groups in work, by ticket sequence; iterating yields them. `lost` counts dropped groups."""

    def __init__(self, buffer: ReplayBuffer, *, every_s: float, store_every_s: float) -> None:
        self._buffer = buffer
        self._every_s = every_s
        self._store_every_s = store_every_s
        self._works: dict[int, GroupRollout] = {}
        self.lost = 0

    def __iter__(self) -> Iterator[GroupRollout]:
        return iter(list(self._works.values()))

    def __len__(self) -> int:
        return len(self._works)

    def hold(self, work: GroupRollout) -> None:
        """Take up a group. An earlier attempt at it that is still in work here is dropped."""
        if (earlier := self._works.get(work.ticket.seq)) is not None:
            self.drop(earlier)
        self._works[work.ticket.seq] = work

    def forget(self, work: GroupRollout) -> None:
        """Remove a group that has ended here."""
        if self._works.get(work.ticket.seq) is work:
            del self._works[work.ticket.seq]

    def drop(self, work: GroupRollout) -> None:
        """Stop working on a group whose lease was lost."""
        self.forget(work)
        self.lost += 1
        log.warning("lease lost, group dropped", seq=work.ticket.seq, attempt=work.ticket.attempt)
        if work.doing is not None:
            work.doing.cancel()

    async def run(self) -> None:
        """Renew the leases every `every_s` seconds, until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.renew()

    async def renew(self) -> None:
        """Renew the leases of all groups once, and drop the groups whose lease the buffer no longer knows."""
        held = {work.ticket.seq: work for work in self if not work.settling}
        lost = await self._buffer.heartbeat([work.ticket for work in held.values()])
        for work in (held[seq] for seq in lost if seq in held):
            if self._works.get(work.ticket.seq) is work and not work.settling:
                self.drop(work)

    async def run_storing(self) -> None:
        """Store partials every `store_every_s` seconds, until cancelled."""
        while True:
            await asyncio.sleep(self._store_every_s)
            await self.store()

    async def store(self) -> None:
        """Store what was generated since the last time, so that a crash costs no more than that."""
        for work in self:
            partial = work.partial()
            if (
                not work.settling
                and self._works.get(work.ticket.seq) is work
                and tokens_of(partial) > work.stored_tokens
            ):
                await self._store(work, partial)

    async def give_back(self, work: GroupRollout) -> None:
        """Store what exists and end the lease, so that another server goes on at once. If the call is cancelled, the
        group stays in work, to be given back later."""
        self.forget(work)
        try:
            partial = work.partial()
            if tokens_of(partial) > work.stored_tokens:
                await self._buffer.progress(work.ticket, partial)
            await self._buffer.give_back(work.ticket)
        except BufferFault:
            pass  # the lease or the run has ended: nothing to give back
        except asyncio.CancelledError:
            self._works.setdefault(work.ticket.seq, work)
            raise

    def keep_partials(self) -> None:
        """Remember what exists of every group, for `give_back`: all generation is about to be cancelled."""
        for work in self:
            work.kept = work.partial()  # which is the same from then on

    async def _store(self, work: GroupRollout, partial: Partial) -> None:
        try:
            await self._buffer.progress(work.ticket, partial)
        except LeaseLost:
            if not work.settling:
                self.drop(work)
        else:
            work.stored_tokens = tokens_of(partial)
