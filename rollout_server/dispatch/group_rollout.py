"""One group in the making: its ticket, the samples so far, and what is stored of them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from async_grpo.wire import Group, Partial, Sample, Ticket
from rollout_server.workflows.session import SampleSession


@dataclass(eq=False)
class GroupRollout:
    """Bookkeeping for one ticket. `samples[i]` is None (nothing yet), unfinished (finish reason "") or finished.

    It holds `group_size` samples, or more if it over-samples, and is complete once `group_size` have finished.
    """

    ticket: Ticket
    group_size: int
    samples: list[Sample | None]
    sessions: dict[int, SampleSession] = field(default_factory=dict)
    """Sessions of the samples that are being made now, by sample index."""
    finish_order: list[int] = field(default_factory=list)
    started_s: float = field(default_factory=time.time)
    task: asyncio.Task[None] | None = None
    is_ending: bool = False
    """True while `GroupsInProgress.end` waits for the buffer, whose answer decides whether the lease still holds."""
    saving: asyncio.Task[None] | None = None
    """The newest save of the partial."""
    saved_tokens: int = 0
    """Tokens of the partial that the buffer holds."""
    committed: int = 0
    """Samples that count as committed in the dispatcher's slots; only `GroupsInProgress` changes it."""
    frozen_partial: Partial | None = None
    """The partial as it was just before generation was cancelled."""
    counts_as_expired: bool = False
    """True if the engine died with a request of this group."""
    error: str = ""
    """Why a workflow failed, "" if none did."""
    is_overdue: bool = False
    """True if the workflow failed because it did not return by its deadline."""

    @classmethod
    def resume(cls, ticket: Ticket, group_size: int, *, oversample: int = 0) -> GroupRollout:
        """A group for the ticket that continues the partial of an earlier attempt, if there is one."""
        samples = list(ticket.partial.samples) if ticket.partial is not None else []
        size = group_size + oversample
        group = cls(ticket, group_size, (samples + [None] * size)[:size])
        group.finish_order = [index for index, sample in enumerate(group.samples) if _is_finished(sample)]
        group.saved_tokens = group.tokens
        return group

    @property
    def missing(self) -> list[int]:
        """Indices of samples that have not finished; empty once `group_size` have."""
        if len(self.finish_order) >= self.group_size:
            return []
        return [index for index, sample in enumerate(self.samples) if not _is_finished(sample)]

    @property
    def tokens(self) -> int:
        """Number of tokens of the samples so far, without those of open sessions."""
        return sum(sample.length for sample in self.samples if sample is not None)

    @property
    def version_needed(self) -> int:
        """Version to wait for: no token may be older than the ticket, or than the tokens before it."""
        versions = [span.version for sample in self.samples if sample for span in sample.spans]
        return max([self.ticket.version, *versions])

    @property
    def samples_in_engine(self) -> list[int]:
        """Indices of the samples of which the engine has a request."""
        missing = self.missing  # none once the group is complete: the requests that over-sampling left are aborted
        return sorted(index for index, session in self.sessions.items() if index in missing and session.is_generating)

    def keep_sample(self, index: int, sample: Sample) -> None:
        """Store sample `index` as its workflow returned it."""
        if _is_finished(sample):
            self.finish_order.append(index)
        self.samples[index] = sample if sample.length or _is_finished(sample) else None

    def finished_samples(self) -> list[Sample]:
        """The first `group_size` samples that finished, in order of their index."""
        chosen = sorted(self.finish_order[: self.group_size])
        return [sample for index in chosen if (sample := self.samples[index]) is not None]

    def partial(self) -> Partial:
        """All tokens so far (or when it was frozen), for the server that continues the group."""
        if self.frozen_partial is not None:
            return self.frozen_partial
        return Partial(seq=self.ticket.seq, attempt=self.ticket.attempt, samples=self._so_far())

    def freeze_partial(self) -> None:
        """Keep `partial` as it is now; the first call counts."""
        self.frozen_partial = self.partial()

    def _so_far(self) -> list[Sample | None]:
        now = {index: session.snapshot() for index, session in self.sessions.items()}
        return [now.get(index) or sample for index, sample in enumerate(self.samples)]

    def finished_group(self, server: str, samples: list[Sample]) -> Group:
        """The group of these samples, as the buffer takes it."""
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
    return sum(sample.length for sample in partial.samples if sample is not None)


def _is_finished(sample: Sample | None) -> bool:
    return sample is not None and sample.finish_reason != ""
