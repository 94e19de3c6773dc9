"""Groups that this server is generating, from their lease to their end.

    admit --> GroupsInProgress --renew_leases, every renew_every_s ---------> buffer
                     |---------- save_partials, every save_every_s ---------> buffer
                     |---------- end_group, in one of four ways ------------> buffer

Both loops are paced by timers; nothing wakes them early. A group whose lease is lost is dropped: another server
generates it now, and the buffer would reject our insert.

Only this module counts a group's samples in `SampleSlots`: from `reserve_slots` until the sample or its group ends.
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
    """Another server, or this one later, will finish the group."""


@dataclass(frozen=True, slots=True)
class Drop:
    """The buffer has already ended the lease: it was lost, or the run is over."""


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
        our renewal noticed.
        """
        earlier = self._groups.get(group.ticket.seq)
        if earlier is not None and not earlier.is_ending:
            self._record_lost_lease(earlier)
            self._remove_group(earlier)
        self._groups[group.ticket.seq] = group

    def reserve_slots(self, group: GroupRollout) -> None:
        """Reserve slots for the remaining samples, until `release_reserved_slot` or the end of the group."""
        group.reserved_slots = len(group.remaining_indices)
        self._slots.reserve_samples(group.reserved_slots)

    def release_reserved_slot(self, group: GroupRollout) -> None:
        """Free the slot of one ended sample. Does nothing after the end of the group, which freed all its slots."""
        self._release_reserved_slots(group, min(1, group.reserved_slots))

    async def end_group(self, group: GroupRollout, ending: Ending) -> bool:
        """End a group. Every group ends here, once, except an earlier attempt that `add_group` replaces.

            ending           group.task          partial   call to the buffer          also False if
            ---------------  ------------------  --------  --------------------------  ------------------------------
            Insert(group)    is the caller       -         insert_group                the lease was lost, or the run
                                                                                       has ended
            Discard(reason)  is the caller       -         discard_group               the same
            GiveBack()       cancelled at the    saved     save_partial (new tokens),  never
                             end, if any                   give_back
            Drop()           cancelled at the    -         none                        never
                             end, if any

        In every case the group is removed, its lease is no longer renewed, and its slots are free. If the call to the
        buffer is cancelled or raises an unexpected error, the group stays in progress for a later GiveBack. Returns
        False without effect if the group is no longer in progress.
        """
        if group not in self:
            return False

        # Neither the renewal nor the saving loop may touch the group now. Once the buffer has accepted the call the
        # lease is gone, so a renewal would report it as lost, and we would cancel a group that has just succeeded.
        group.is_ending = True
        try:
            match ending:
                case Insert(finished):
                    await self._buffer.insert_group(group.ticket, finished)
                case Discard(reason):
                    await self._buffer.discard_group(group.ticket, reason)
                case GiveBack():
                    await self._give_back(group)
                case Drop():
                    pass  # the buffer has already ended the lease
        except LeaseLost:
            self._record_lost_lease(group)
            self._remove_group(group)
            return False
        except RunEnded:
            self._remove_group(group)
            return False
        finally:
            group.is_ending = False
        self._remove_group(group)
        return True

    async def run_renewing(self) -> None:
        """Renew the leases every `renew_every_s` seconds, until cancelled."""
        while True:
            await asyncio.sleep(self._renew_every_s)
            await self.renew_leases()

    async def renew_leases(self) -> None:
        """Renew all leases once, and drop the groups whose lease is lost."""
        groups = {group.ticket.seq: group for group in self if not group.is_ending}
        lost = await self._buffer.renew_leases([group.ticket for group in groups.values()])

        for seq in lost:
            # The group may have ended, or been replaced by a newer attempt, while we waited for the answer.
            group = groups[seq]
            if group in self and not group.is_ending:
                self._record_lost_lease(group)
                await self.end_group(group, Drop())

    async def run_saving(self) -> None:
        """Save partials every `save_every_s` seconds, until cancelled."""
        while True:
            await asyncio.sleep(self._save_every_s)
            await self.save_partials()

    async def save_partials(self) -> None:
        """Save the tokens generated since the last save, which bounds the loss after a crash."""
        for group in self:
            # The group may have ended while we saved an earlier one.
            if group in self and not group.is_ending:
                await self._save_partial(group)

    def snapshot_partials(self) -> None:
        """Take a snapshot of every partial for `GiveBack`, before generation is cancelled and its tokens are lost."""
        for group in self:
            group.snapshot_partial()

    def expire_leases_in_engine(self) -> None:
        """Mark the groups with a request in the engine, which has died: each of them may have killed it.

        Their leases count as expired when they are given back, so that a group that kills every engine ends as `failed`
        after max_attempts.
        """
        for group in self:
            samples = group.samples_in_engine
            if group.counts_as_expired or not samples:
                continue
            group.counts_as_expired = True
            log.warning(
                "the engine died while it generated this group",
                seq=group.ticket.seq,
                task=group.ticket.task.index,
                attempt=group.ticket.attempt,
                samples=", ".join(str(index) for index in samples),
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

        # A cancelled save may still be on its way to the buffer's server, where it could replace the newer partial that
        # GiveBack saves over another connection. So cancelling this loop does not cancel the save, and GiveBack waits
        # for it.
        group.saving = asyncio.create_task(save())
        group.saving.add_done_callback(_retrieve_error)
        try:
            await asyncio.shield(group.saving)
        except LeaseLost:
            if group in self and not group.is_ending:
                self._record_lost_lease(group)
                await self.end_group(group, Drop())

    async def _give_back(self, group: GroupRollout) -> None:
        """Save the partial and end the lease, so that another server can continue immediately."""
        if group.saving is not None:
            # `wait` does not cancel the save if this call is cancelled, as `gather` would.
            await asyncio.wait([group.saving])
        try:
            partial = group.partial()
            if token_count(partial) > group.saved_tokens:
                await self._buffer.save_partial(group.ticket, partial)
            await self._buffer.give_back(group.ticket, count_as_expired=group.counts_as_expired)
        except BufferFault:
            pass  # the lease or the run has ended, or the buffer is unreachable and the lease will expire

    def _record_lost_lease(self, group: GroupRollout) -> None:
        self.lost_leases += 1
        log.warning("lease lost, group dropped", seq=group.ticket.seq, attempt=group.ticket.attempt)

    def _remove_group(self, group: GroupRollout) -> None:
        """Remove a group that has ended, free its slots and cancel its task. Leaves a newer attempt in place."""
        if group in self:
            del self._groups[group.ticket.seq]
        self._release_reserved_slots(group, group.reserved_slots)
        # The task itself calls this for Insert and Discard, and it must not cancel itself.
        if group.task is not None and group.task is not asyncio.current_task():
            group.task.cancel()

    def _release_reserved_slots(self, group: GroupRollout, count: int) -> None:
        group.reserved_slots -= count
        self._slots.release_samples(count)


def _retrieve_error(saving: asyncio.Task[None]) -> None:
    """Retrieve the error of a save that nobody awaits any more: asyncio logs errors that are never retrieved."""
    if not saving.cancelled():
        saving.exception()
