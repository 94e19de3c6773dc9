"""State of one group while this server generates it: its ticket, its samples, and the partial saved in the buffer.

A sample moves through these states; only finished ones count towards `group_size`:

    None --session opens--> in sessions[i] --workflow returns--> finished (finish_reason set)
                               |      ^  \--workflow fails----> failed   (finish_reason and unverifiable set)
              engine interrupts|      |session opens, prior=samples[i]
                               v      |
                            unfinished (finish_reason "")
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from async_grpo.wire import Group, Partial, Sample, Ticket
from rollout_server.workflows.session import SampleSession


@dataclass(eq=False)
class GroupRollout:
    """One ticket and its samples: `group_size`, or more with over-sampling.

    The group is complete once `group_size` samples have finished, or all have finished or failed.
    """

    ticket: Ticket
    group_size: int
    samples: list[Sample | None]
    sessions: dict[int, SampleSession] = field(default_factory=dict)
    """Open sessions, by sample index."""
    finish_order: list[int] = field(default_factory=list)
    """Indices of finished samples, in the order in which they finished."""
    started_s: float = field(default_factory=time.time)
    task: asyncio.Task[None] | None = None
    """The dispatcher's task for this group; None before it starts."""
    is_ending: bool = False
    """True while `GroupsInProgress.end_group` waits for the buffer's answer, on which the fate of the lease depends."""
    saving: asyncio.Task[None] | None = None
    """The latest save of the partial, running or done."""
    saved_tokens: int = 0
    """Number of tokens in the partial that the buffer has."""
    reserved_slots: int = 0
    """Slots reserved in `SampleSlots` for samples of this group; only `GroupsInProgress` changes it."""
    frozen_partial: Partial | None = None
    """Snapshot of the partial from just before generation was cancelled."""
    counts_as_expired: bool = False
    """True if the lease counts as expired when the group is given back: the engine died with one of its requests."""

    @classmethod
    def from_ticket(cls, ticket: Ticket, group_size: int, *, oversample: int = 0) -> GroupRollout:
        """A group that continues the partial of an earlier attempt, if the ticket has one."""
        samples: list[Sample | None] = []
        if ticket.partial is not None:
            samples = list(ticket.partial.samples)
        size = group_size + oversample
        samples = (samples + [None] * size)[:size]

        group = cls(ticket, group_size, samples)
        group.finish_order = [index for index, sample in enumerate(samples) if _can_be_judged(sample)]
        group.saved_tokens = _count_tokens(samples)
        return group

    @property
    def remaining_indices(self) -> list[int]:
        """Indices of samples that have not ended; empty once the group is complete."""
        if len(self.finish_order) >= self.group_size:
            return []
        return [index for index, sample in enumerate(self.samples) if not _is_finished(sample)]

    @property
    def required_version(self) -> int:
        """Minimum engine version: no token may be older than the ticket, or than the tokens before it."""
        versions = [span.version for sample in self.samples if sample for span in sample.spans]
        return max([self.ticket.version, *versions])

    @property
    def samples_in_engine(self) -> list[int]:
        """Indices of samples with a request in the engine."""
        # Requests of surplus samples are aborted once the group is complete; `remaining_indices` is empty then.
        remaining = self.remaining_indices
        return sorted(index for index, session in self.sessions.items() if index in remaining and session.is_generating)

    def store_sample(self, index: int, sample: Sample) -> None:
        """Store the sample that its workflow returned, or what there is of it if the workflow has failed."""
        if _can_be_judged(sample):
            self.finish_order.append(index)
        self.samples[index] = sample if sample.length or _is_finished(sample) else None

    def ended_samples(self) -> list[Sample]:
        """The first `group_size` samples that finished, in order of their index.

        If fewer have finished, failed samples take the remaining places: a group has a fixed size.
        """
        failed = [
            index for index, sample in enumerate(self.samples) if _is_finished(sample) and not _can_be_judged(sample)
        ]
        chosen = [*self.finish_order, *failed][: self.group_size]
        return [sample for index in sorted(chosen) if (sample := self.samples[index]) is not None]

    def partial(self) -> Partial:
        """All tokens so far, for the server that continues the group; the snapshot if there is one."""
        if self.frozen_partial is not None:
            return self.frozen_partial
        samples = list(self.samples)
        for index, session in self.sessions.items():
            snapshot = session.snapshot()
            if snapshot is not None:
                samples[index] = snapshot
        return Partial(seq=self.ticket.seq, attempt=self.ticket.attempt, samples=samples)

    def snapshot_partial(self) -> None:
        """Take the snapshot that `partial` returns from now on. Later calls change nothing."""
        self.frozen_partial = self.partial()

    def build_group(self, server: str, samples: list[Sample]) -> Group:
        """Return the group with these samples, ready to insert."""
        ticket = self.ticket
        return Group(
            seq=ticket.seq,
            attempt=ticket.attempt,
            task=ticket.task,
            samples=samples,
            server=server,
            admitted_version=ticket.version,
            started_s=self.started_s,
            finished_s=time.time(),
        )


def token_count(partial: Partial) -> int:
    """Number of tokens of all samples of the partial."""
    return _count_tokens(partial.samples)


def _count_tokens(samples: list[Sample | None]) -> int:
    return sum(sample.length for sample in samples if sample is not None)


def _is_finished(sample: Sample | None) -> bool:
    return sample is not None and sample.finish_reason != ""


def _can_be_judged(sample: Sample | None) -> bool:
    """True for a finished sample whose workflow has not failed. Verifiers have not judged it yet."""
    return sample is not None and _is_finished(sample) and not sample.unverifiable
