"""The groups that this server is generating, from their lease to their end.

    admit --> GroupsInProgress --renew_leases, every lease_s / 3 -----------> buffer
                     |---------- save_partials, every progress_interval_s --> buffer
                     |---------- end, in one of four ways ------------------> buffer

Both loops wait for their timers only. A group whose lease is lost is dropped: another server generates it now, and the
buffer would refuse our insert.

This is also the only place that counts a group's samples in `SampleSlots`: from `add_group` (or `commit_slots`) until
the sample or its group has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import structlog

from async_grpo.errors import BufferFault, LeaseLost, RunEnded
from async_grpo.wire import Group, ReleaseReason
from buffer.base import ReplayBuffer
from rollout_server.dispatch.concurrency import SampleSlots
from rollout_server.dispatch.group_rollout import GroupRollout, token_count

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Insert:
    """The group is finished."""

    finished: Group


@dataclass(frozen=True, slots=True)
class Discard:
    """The group cannot be trained."""

    reason: ReleaseReason


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Another server, or this one later, is to finish the group."""


@dataclass(frozen=True, slots=True)
class Drop:
    """The buffer has ended the lease already: it was lost, or the run is over."""


Ending = Insert | Discard | GiveBack | Drop


class GroupsInProgress:
    """Groups by ticket sequence number. Iterating yields a snapshot, so groups may end while you iterate."""

    def __init__(
        self, buffer: ReplayBuffer, slots: SampleSlots, *, renew_every_s: float, save_every_s: float, max_attempts: int
    ) -> None:
        self._buffer = buffer
        self._slots = slots
        self._renew_every_s = renew_every_s
        self._save_every_s = save_every_s
        self._max_attempts = max_attempts
        self._groups: dict[int, GroupRollout] = {}
        self.lost_leases = 0

    def __iter__(self) -> Iterator[GroupRollout]:
        return iter(list(self._groups.values()))

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group: GroupRollout) -> bool:
        return self._groups.get(group.ticket.seq) is group

    def add_group(self, group: GroupRollout) -> None:
        """Add a group, replacing an earlier attempt at the same ticket.

        An earlier attempt can still be here if its lease expired and the buffer offered the ticket to us again before
        our heartbeat noticed.
        """
        earlier = self._groups.get(group.ticket.seq)
        if earlier is not None and not earlier.is_ending:
            self._note_lost_lease(earlier)
            self._remove(earlier)
        self._groups[group.ticket.seq] = group

    def commit_slots(self, group: GroupRollout) -> None:
        """Count the group's missing samples as committed, until `free_slot` or the end of the group."""
        group.committed = len(group.missing)
        self._slots.commit(group.committed)

    def free_slot(self, group: GroupRollout) -> None:
        """One sample of the group has ended. Does nothing once the group itself has, which freed all its slots."""
        self._free_slots(group, min(1, group.committed))

    async def end(self, group: GroupRollout, how: Ending) -> bool:
        """Part with a group. This is the only way; every group that was added comes here, once.

            how              its task            partial   call to the buffer            False if
            ---------------  ------------------  --------  ----------------------------  ------------------------
            Insert(group)    is the caller       -         insert_group                  the lease was lost
            Discard(reason)  is the caller       -         discard_group                 the lease was lost
            GiveBack()       cancelled, if any   saved     save_partial (new tokens),    never
                                                           give_back (counted as
                                                           expired if the group is)
            Drop()           cancelled, if any   -         none                          never

        In every case the group leaves this object, its leases are no longer renewed, and its slots are free. If the
        call to the buffer is cancelled or fails otherwise, the group stays, for a later GiveBack. Does nothing, and
        returns False, if the group is not here any more.
        """
        if group not in self:
            return False

        # Neither the heartbeat nor the saving loop may touch it now. Once the buffer has accepted the call the lease is
        # gone, so a heartbeat would report it as lost, and we would cancel a group that has just succeeded.
        group.is_ending = True
        try:
            match how:
                case Insert(finished):
                    await self._buffer.insert_group(group.ticket, finished)
                case Discard(reason):
                    await self._buffer.discard_group(group.ticket, reason)
                case GiveBack():
                    await self._give_back(group)
        except LeaseLost:
            self._note_lost_lease(group)
            self._remove(group)
            return False
        except RunEnded:
            self._remove(group)
            return False
        finally:
            group.is_ending = False
        self._remove(group)
        return True

    async def run_renewing(self) -> None:
        """Renew the leases every `renew_every_s` seconds, until cancelled."""
        while True:
            await asyncio.sleep(self._renew_every_s)
            await self.renew_leases()

    async def renew_leases(self) -> None:
        """Renew all leases once, and drop the groups whose lease the buffer no longer knows."""
        groups = {group.ticket.seq: group for group in self if not group.is_ending}
        lost = await self._buffer.renew_leases([group.ticket for group in groups.values()])

        for seq in lost:
            # The group may have ended, or been replaced by a newer attempt, while we waited for the answer.
            group = groups[seq]
            if group in self and not group.is_ending:
                self._note_lost_lease(group)
                await self.end(group, Drop())

    async def run_saving(self) -> None:
        """Save partials every `save_every_s` seconds, until cancelled."""
        while True:
            await asyncio.sleep(self._save_every_s)
            await self.save_partials()

    async def save_partials(self) -> None:
        """Save what was generated since the last time, so that a crash costs no more than that."""
        for group in self:
            if group in self and not group.is_ending:
                await self._save_partial(group)

    def freeze_partials(self) -> None:
        """Take a snapshot of every partial, for `GiveBack`. Cancelling generation would lose the tokens."""
        for group in self:
            group.freeze_partial()

    def count_lease_of_groups_in_engine(self) -> None:
        """The engine has died: mark the groups of which it had a request, because each of them may have killed it.

        Their leases count as expired when they are given back, so that a group that kills every engine ends as `failed`
        after max_attempts.
        """
        for group in self:
            if not group.counts_as_expired and (samples := group.samples_in_engine):
                group.counts_as_expired = True
                log.warning(
                    "the engine died while it generated this group",
                    seq=group.ticket.seq,
                    task=group.ticket.task.index,
                    attempt=group.ticket.attempt,
                    samples=", ".join(map(str, samples)),
                    expired_leases=group.ticket.expired_leases + 1,
                    failed_at=self._max_attempts,
                )

    async def _save_partial(self, group: GroupRollout) -> None:
        partial = group.partial()
        if token_count(partial) <= group.saved_tokens:
            return

        async def save() -> None:
            await self._buffer.save_partial(group.ticket, partial)
            group.saved_tokens = token_count(partial)

        # A save that was cancelled may still be on its way to the server, where it could replace the newer partial
        # that GiveBack saves over another connection. So it is never cancelled with this loop; GiveBack waits for it.
        group.saving = asyncio.create_task(save())
        group.saving.add_done_callback(_retrieve_error)
        try:
            await asyncio.shield(group.saving)
        except LeaseLost:
            if group in self and not group.is_ending:
                self._note_lost_lease(group)
                await self.end(group, Drop())

    async def _give_back(self, group: GroupRollout) -> None:
        if group.saving is not None:
            await asyncio.gather(group.saving, return_exceptions=True)
        try:
            partial = group.partial()
            if token_count(partial) > group.saved_tokens:
                await self._buffer.save_partial(group.ticket, partial)
            await self._buffer.give_back(group.ticket, count_as_expired=group.counts_as_expired)
        except BufferFault:
            pass  # the lease or the run has ended, or the buffer is gone: the lease runs out by itself

    def _note_lost_lease(self, group: GroupRollout) -> None:
        self.lost_leases += 1
        log.warning("lease lost, group dropped", seq=group.ticket.seq, attempt=group.ticket.attempt)

    def _remove(self, group: GroupRollout) -> None:
        """Forget a group that has ended. Does not touch a newer attempt that has replaced it."""
        if group in self:
            del self._groups[group.ticket.seq]
        self._free_slots(group, group.committed)
        if group.task is not None and group.task is not asyncio.current_task():
            group.task.cancel()

    def _free_slots(self, group: GroupRollout, count: int) -> None:
        group.committed -= count
        self._slots.finish(count)


def _retrieve_error(saving: asyncio.Task[None]) -> None:
    """Retrieve the error of a save that nobody waits for any more, so that asyncio does not log it."""
    if not saving.cancelled():
        saving.exception()
