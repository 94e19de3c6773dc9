"""The errors of the replay buffer's contract, worded once for all implementations."""

from __future__ import annotations

from async_grpo.errors import BufferFault, Fenced, LeaseLost, RunEnded, StepsForgotten, StreamGap
from async_grpo.wire import ReleaseReason, Ticket


def lease_lost(ticket: Ticket) -> LeaseLost:
    """The error of a caller that no longer holds the ticket."""
    return LeaseLost(
        f"{ticket.holder} no longer holds attempt {ticket.attempt} of group {ticket.seq}: its lease expired or was "
        "given back, or the group has ended. Drop the work; the next holder continues. Raise rollout.lease_s if this "
        "happens to a live server"
    )


def fenced(caller: int, newest: int) -> Fenced:
    """The error of a trainer whose epoch is over."""
    return Fenced(
        f"epoch {caller} is over, epoch {newest} has begun: another trainer has taken over, and the buffer refuses "
        "the calls of this one. Stop it"
    )


def run_ended() -> RunEnded:
    """The error of a wait that ends because the run has ended."""
    return RunEnded("the run has ended: no group is admitted or delivered any more")


def forgotten(version: int, committed: int) -> StepsForgotten:
    """The error of a trainer that resumes at steps whose groups are deleted."""
    return StepsForgotten(
        f"cannot resume at version {version}: a checkpoint of version {committed} was committed, which deleted the "
        f"groups of the steps before it. Resume from version {committed} or later; or give up those "
        f"{committed - version} steps and train them again on new groups (async-grpo resume RUN --from {version}); or "
        "start over with --fresh"
    )


def take_too_late(version: int, committed: int) -> BufferFault:
    """The error of a `take` for a step that a committed checkpoint contains, such as a delayed repetition."""
    return BufferFault(
        f"a batch was requested for version {version}, but a checkpoint of version {committed} is committed: "
        "that step is over, and its groups are deleted. Nothing was taken"
    )


def forgotten_run(run: str) -> BufferFault:
    """The error of a run whose state has vanished from the server."""
    return BufferFault(
        f"the server holds nothing of run {run}: its data were lost or wiped during the run. Restore the server's "
        "append-only file, or start over with --fresh"
    )


def groups_of_step(version: int) -> str:
    """Name what a `take` waits for, for the text of WaitTimeout."""
    return f"the groups of the step after version {version} from the rollout servers"


def gap(first: int, following: int) -> StreamGap:
    """The error of tasks that would leave a gap in the stream."""
    return StreamGap(
        f"task {first} does not continue the stream: task {following} is next. Nothing was stored. Read tasks_put "
        f"from the buffer's stats, and put the tasks from {following} on"
    )


def checked_stream(indices: list[int]) -> None:
    """Raises ValueError unless the indices are consecutive."""
    if indices and indices != list(range(indices[0], indices[0] + len(indices))):
        raise ValueError(f"task indices {indices} are not consecutive: the stream would have a gap")


def checked_reason(reason: ReleaseReason) -> ReleaseReason:
    """Return the reason if a group may be discarded for it. Raises ValueError for `trained`."""
    if reason is ReleaseReason.TRAINED:
        raise ValueError("a group that was not taken cannot be discarded as trained. Pass the real reason")
    return reason
