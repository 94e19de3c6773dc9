"""A group that is being made: its ticket and the samples so far."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from async_grpo.wire import Group, Partial, Sample, Ticket


@dataclass(eq=False)
class GroupWork:
    """Bookkeeping for one ticket. `samples[i]` is None (nothing yet), unfinished ("") or finished."""

    ticket: Ticket
    samples: list[Sample | None]
    started_s: float = field(default_factory=time.time)
    doing: asyncio.Task[None] | None = None
    settling: bool = False
    """insert or discard is on its way: its own answer says whether the lease still holds."""
    stored: int = 0
    """Finished samples that the buffer already has as partial."""
    committed: int = 0
    """Samples that still hold a place in the dispatcher's slots."""
    error: str = ""
    """Why a workflow failed."""

    @classmethod
    def resume(cls, ticket: Ticket, group_size: int) -> GroupWork:
        """Take up what an earlier attempt left."""
        samples = list(ticket.partial.samples) if ticket.partial is not None else []
        work = cls(ticket, (samples + [None] * group_size)[:group_size])
        work.stored = work.finished
        work.committed = len(work.missing)
        return work

    @property
    def missing(self) -> list[int]:
        """Samples that have not finished."""
        return [index for index, sample in enumerate(self.samples) if not _is_finished(sample)]

    @property
    def finished(self) -> int:
        """How many samples have finished."""
        return len(self.samples) - len(self.missing)

    @property
    def version_needed(self) -> int:
        """No token may be older than the ticket, nor older than the tokens before it."""
        versions = [span.version for sample in self.samples if sample for span in sample.spans]
        return max([self.ticket.version, *versions])

    def partial(self) -> Partial:
        """What exists so far, for whoever goes on."""
        return Partial(seq=self.ticket.seq, attempt=self.ticket.attempt, samples=list(self.samples))

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


def _is_finished(sample: Sample | None) -> bool:
    return sample is not None and sample.finish_reason != ""
