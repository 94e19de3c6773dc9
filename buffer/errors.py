"""The errors of the replay buffer's interface, with the same text in all implementations."""

from __future__ import annotations

from async_grpo.errors import BufferFault, Fenced, LeaseLost, RunEnded, StepsForgotten, StreamGap
from async_grpo.wire import ReleaseReason, Ticket


def lease_lost_error(ticket: Ticket) -> LeaseLost:
    """Return the error of a holder whose lease is lost."""
    return LeaseLost(
        f"{ticket.holder} no longer holds attempt {ticket.attempt} of group {ticket.seq}: its lease expired or was "
        "given back, or the group has ended. Drop the work; the next holder continues. Raise rollout.lease_s if this "
        "happens to a live server"
    )


def fenced_error(caller: int, newest: int) -> Fenced:
    """Return the error of a trainer whose epoch is over."""
    return Fenced(
        f"epoch {caller} is over, epoch {newest} has started: another trainer has taken over, and the buffer refuses "
        "the calls of this one. Stop it"
    )


def run_ended_error() -> RunEnded:
    """Return the error of a wait that ends because the run has ended."""
    return RunEnded("the run has ended: no more groups are admitted or delivered")


def steps_forgotten_error(version: int, committed: int) -> StepsForgotten:
    """Return the error of a trainer that resumes at steps whose groups are deleted."""
    return StepsForgotten(
        f"cannot resume at version {version}: a checkpoint of version {committed} was committed, which deleted the "
        f"groups of the steps before it. Resume from version {committed} or later; or give up those "
        f"{committed - version} steps and train them again on new groups (async-grpo resume RUN --from {version}); or "
        "start over with --fresh"
    )


def take_too_late_error(version: int, committed: int) -> BufferFault:
    """Return the error of a `take_batch` for a step that a committed checkpoint contains, such as a delayed retry."""
    return BufferFault(
        f"a batch was requested for version {version}, but a checkpoint of version {committed} is committed: "
        "that step is over, and its groups are deleted. Nothing was taken"
    )


def run_vanished_error(run: str) -> BufferFault:
    """Return the error of a run whose state has vanished from the server."""
    return BufferFault(
        f"the server has no data of run {run}: they were lost or wiped during the run. Restore the server's "
        "append-only file, or start over with --fresh"
    )


def stream_gap_error(first: int, next_index: int) -> StreamGap:
    """Return the error of tasks that would leave a gap in the stream."""
    return StreamGap(
        f"task {first} does not continue the stream: task {next_index} is next. Nothing was stored. Read tasks_put "
        f"from the buffer's stats, and put the tasks from {next_index} on"
    )


def describe_batch_wait(version: int) -> str:
    """Return the text of WaitTimeout for a `take_batch` that waits."""
    return f"the groups of the step after version {version} from the rollout servers"


def check_consecutive(indices: list[int]) -> None:
    """Raise ValueError unless the task indices are consecutive."""
    if indices and indices != list(range(indices[0], indices[0] + len(indices))):
        raise ValueError(f"task indices {indices} are not consecutive: the stream would have a gap")


def check_discard_reason(reason: ReleaseReason) -> None:
    """Raise ValueError for the reason `trained`."""
    if reason is ReleaseReason.TRAINED:
        raise ValueError("a group that was not taken cannot be discarded as trained. Pass the real reason")
