"""The errors of the contract, worded once for all implementations."""

from __future__ import annotations

from async_grpo.errors import BufferFault, Fenced, LeaseLost, RunEnded, StreamGap
from async_grpo.wire import ReleaseReason, Ticket


def lease_lost(ticket: Ticket) -> LeaseLost:
    """The caller no longer holds the ticket."""
    return LeaseLost(
        f"attempt {ticket.attempt} of group {ticket.seq} is no longer held by {ticket.holder}: its lease expired or "
        "was given back, or the group has ended. Drop the work; the next holder goes on. Raise rollout.lease_s if "
        "this happens to a server that is alive"
    )


def fenced(caller: int, newest: int) -> Fenced:
    """The caller's epoch is over."""
    return Fenced(
        f"epoch {caller} is over, epoch {newest} has taken over: what this trainer says no longer counts. Stop it"
    )


def run_ended() -> RunEnded:
    """Nothing will be admitted or delivered any more."""
    return RunEnded("the run has ended: no group is admitted or delivered any more")


def forgotten(version: int, committed: int) -> BufferFault:
    """A trainer asks for steps whose groups are deleted."""
    return BufferFault(
        f"cannot resume at version {version}: a checkpoint of version {committed} was committed, and the groups of the "
        f"steps before it are deleted. Resume from version {committed} or later, or start over with --fresh"
    )


def forgotten_run(run: str) -> BufferFault:
    """The books are gone."""
    return BufferFault(
        f"the server holds nothing of run {run}: its data were lost or wiped while the run was going on. Restore its "
        "append-only file, or start over with --fresh"
    )


def groups_of_step(version: int) -> str:
    """What a take waits for."""
    return f"the groups of the step after version {version} from the rollout servers"


def gap(first: int, following: int) -> StreamGap:
    """Tasks that leave out some of the stream."""
    return StreamGap(
        f"task {first} does not continue the stream: task {following} is next. Nothing was stored; look at how many "
        "tasks there are, and put them from there"
    )


def checked_stream(indices: list[int]) -> None:
    """Raises ValueError unless the indices follow each other."""
    if indices and indices != list(range(indices[0], indices[0] + len(indices))):
        raise ValueError(f"task indices {indices} do not follow each other: the stream would have a gap")


def checked_reason(reason: ReleaseReason) -> ReleaseReason:
    """A reason that a group may be discarded for. Raises ValueError for `trained`."""
    if reason is ReleaseReason.TRAINED:
        raise ValueError("a group that was not taken cannot be discarded as trained. Give the real reason")
    return reason
