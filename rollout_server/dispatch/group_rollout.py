"""A group that is being made: its ticket and the samples so far."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from async_grpo.wire import Group, Partial, Sample, Ticket
from rollout_server.workflows.session import SampleSession


@dataclass(eq=False)
class GroupRollout:
    """Bookkeeping for one ticket. `samples[i]` is None (nothing yet), unfinished ("") or finished.

    It has `group_size` samples and, if it over-samples, some more: it is whole once `group_size` have finished.
    """

    ticket: Ticket
    group_size: int
    samples: list[Sample | None]
    sessions: dict[int, SampleSession] = field(default_factory=dict)
    """Of the samples that are being made now."""
    finish_order: list[int] = field(default_factory=list)
    started_s: float = field(default_factory=time.time)
    doing: asyncio.Task[None] | None = None
    settling: bool = False
    """insert or discard is on its way: its own answer says whether the lease still holds."""
    stored_tokens: int = 0
    """Tokens that the buffer has as partial."""
    committed: int = 0
    """Samples that still hold a place in the dispatcher's slots."""
    kept: Partial | None = None
    """What existed when generation was cancelled."""
    error: str = ""
    """Why a workflow failed."""
    is_overdue: bool = False
    """That is because it has not returned by its deadline."""

    @classmethod
    def resume(cls, ticket: Ticket, group_size: int, *, oversample: int = 0) -> GroupRollout:
        """Take up what an earlier attempt left."""
        samples = list(ticket.partial.samples) if ticket.partial is not None else []
        size = group_size + oversample
        work = cls(ticket, group_size, (samples + [None] * size)[:size])
        work.finish_order = [index for index, sample in enumerate(work.samples) if _is_finished(sample)]
        work.stored_tokens = work.tokens
        work.committed = len(work.missing)
        return work

    @property
    def missing(self) -> list[int]:
        """Samples that have not finished; none if enough of them have."""
        if len(self.finish_order) >= self.group_size:
            return []
        return [index for index, sample in enumerate(self.samples) if not _is_finished(sample)]

    @property
    def tokens(self) -> int:
        """Tokens of the samples so far, those left out that are being made."""
        return sum(sample.length for sample in self.samples if sample is not None)

    @property
    def version_needed(self) -> int:
        """No token may be older than the ticket, nor older than the tokens before it."""
        versions = [span.version for sample in self.samples if sample for span in sample.spans]
        return max([self.ticket.version, *versions])

    def keep(self, index: int, sample: Sample) -> None:
        """A workflow has returned."""
        if _is_finished(sample):
            self.finish_order.append(index)
        self.samples[index] = sample if sample.length or _is_finished(sample) else None

    def whole(self) -> list[Sample]:
        """The group's samples: the first `group_size` that finished."""
        chosen = sorted(self.finish_order[: self.group_size])
        return [sample for index in chosen if (sample := self.samples[index]) is not None]

    def partial(self) -> Partial:
        """What exists at this moment (or existed when it was kept), for whoever goes on."""
        return self.kept or Partial(seq=self.ticket.seq, attempt=self.ticket.attempt, samples=self._so_far())

    def _so_far(self) -> list[Sample | None]:
        now = {index: session.snapshot() for index, session in self.sessions.items()}
        return [now.get(index) or sample for index, sample in enumerate(self.samples)]

    def group(self, server: str, samples: list[Sample]) -> Group:
        """The finished group."""
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


def tokens_of(partial: Partial) -> int:
    """Tokens of all samples."""
    return sum(sample.length for sample in partial.samples if sample is not None)


def _is_finished(sample: Sample | None) -> bool:
    return sample is not None and sample.finish_reason != ""
