"""Simulated groups: their samples and lengths, which the records in the buffer leave out."""

from __future__ import annotations

from async_grpo.lab.simulate.context import SimulationContext
from async_grpo.lab.simulate.engine import SimulatedSample
from async_grpo.wire import Group, Sample, Ticket
from async_grpo.wire.records import VersionSpan

GROUPS_PER_DRAW = 512
"""Number of groups whose lengths are drawn together, which is faster than one by one."""


class SimulatedGroup:
    """A ticket's samples. It is complete once `needed` have ended; with over-sampling there are more."""

    __slots__ = (
        "committed",
        "ended",
        "needed",
        "prompt_read",
        "samples",
        "seq",
        "started_s",
        "ticket",
        "versions_before_insert",
    )

    def __init__(self, seq: int, lengths: list[float], needed: int) -> None:
        self.seq = seq
        self.samples = [SimulatedSample(self, length) for length in lengths]
        self.needed = needed
        self.ended: list[SimulatedSample] = []
        self.prompt_read = False
        self.ticket: Ticket | None = None
        self.committed = 0
        """Samples that count as committed in the server's slots."""
        self.started_s = 0.0
        self.versions_before_insert = 0
        """Versions published between its admission and its insert."""

    @property
    def missing(self) -> list[SimulatedSample]:
        """The samples that have not ended; none once enough have."""
        return [] if len(self.ended) >= self.needed else [sample for sample in self.samples if sample.left > 0]

    @property
    def tokens(self) -> dict[int, float]:
        """Version -> tokens of the samples that count."""
        total: dict[int, float] = {}
        for sample in self.ended[: self.needed]:
            for version, tokens in sample.tokens.items():
                total[version] = total.get(version, 0.0) + tokens
        return total

    def record(self) -> Group:
        """The group as the buffer takes it: one sample without tokens that has the oldest and the newest version."""
        assert self.ticket is not None
        versions = self.tokens
        oldest, newest = min(versions), max(versions)
        spans = [VersionSpan(oldest, 0, 0), VersionSpan(newest, 0, 0)]
        samples = [Sample(tokens=b"", logprobs=b"", spans=spans)]
        return Group(seq=self.seq, attempt=self.ticket.attempt, task=self.ticket.task, samples=samples)


class SimulatedGroups(dict[int, SimulatedGroup]):
    """Groups that a batch may still contain, by sequence. Draws the lengths of new ones."""

    def __init__(self, context: SimulationContext) -> None:
        super().__init__()
        self._settings = context.settings
        self._lengths = context.timings.lengths
        self._generator = context.generator
        self._drawn: list[list[float]] = []
        """Lengths of the samples of groups to come, the next group last."""
        self._drawn_so_far = 0

    def find_or_create(self, seq: int) -> SimulatedGroup:
        """The group of that sequence: as an earlier attempt left it, or new."""
        group = self.get(seq)
        if group is None:
            if not self._drawn:
                self._draw_lengths()
            group = self[seq] = SimulatedGroup(seq, self._drawn.pop(), self._settings.group_size)
        return group

    def forget(self, group: SimulatedGroup) -> None:
        """Drop a group that ended untrained, if it is still here. Where such groups are generated again (`recycles`),
        the next new one gets its lengths."""
        known = self.pop(group.seq, None)
        if self._settings.recycles and known is not None:
            self._drawn.append([sample.done for sample in group.samples])

    def _draw_lengths(self) -> None:
        size, first = self._settings.started_samples, self._drawn_so_far
        lengths = self._lengths.groups(self._generator, GROUPS_PER_DRAW, size, first=first)
        self._drawn = lengths[::-1].tolist()
        self._drawn_so_far += GROUPS_PER_DRAW
