"""Simulated groups. They hold the samples and lengths, which the records in the buffer leave out."""

from __future__ import annotations

from async_grpo.lab.simulate.context import SimulationContext
from async_grpo.lab.simulate.engine import SimulatedSample
from async_grpo.wire import Group, Sample, Ticket
from async_grpo.wire.records import VersionSpan

GROUPS_PER_DRAW = 512
"""Number of groups whose lengths are drawn together, which is faster than one by one."""


class SimulatedGroup:
    """The samples of a ticket. Complete once `needed` of them have finished; over-sampling starts more."""

    __slots__ = (
        "admitted_s",
        "finished",
        "is_prompt_read",
        "needed",
        "reserved_slots",
        "samples",
        "seq",
        "ticket",
        "versions_until_insert",
    )

    def __init__(self, seq: int, lengths: list[float], needed: int) -> None:
        self.seq = seq
        self.samples = [SimulatedSample(self, length) for length in lengths]
        self.needed = needed
        self.finished: list[SimulatedSample] = []
        """Finished samples in the order in which they ended."""
        self.is_prompt_read = False
        """True if the prompt is in the prefix cache of the engine."""
        self.ticket: Ticket | None = None
        self.reserved_slots = 0
        """Slots that the server has reserved for samples of this group."""
        self.admitted_s = 0.0
        self.versions_until_insert = 0
        """Versions published between the group's admission and its insert."""

    @property
    def unfinished_samples(self) -> list[SimulatedSample]:
        """Samples that still need tokens; empty once the group is complete."""
        if len(self.finished) >= self.needed:
            return []
        return [sample for sample in self.samples if sample.remaining > 0]

    @property
    def tokens_by_version(self) -> dict[int, float]:
        """Tokens of the samples that are trained."""
        total: dict[int, float] = {}
        for sample in self.finished[: self.needed]:
            for version, tokens in sample.tokens_by_version.items():
                total[version] = total.get(version, 0.0) + tokens
        return total

    def to_wire_group(self) -> Group:
        """Build the record for the buffer: one sample without tokens that spans the oldest and the newest version."""
        assert self.ticket is not None
        versions = self.tokens_by_version
        oldest, newest = min(versions), max(versions)
        spans = [VersionSpan(oldest, 0, 0), VersionSpan(newest, 0, 0)]
        samples = [Sample(tokens=b"", logprobs=b"", spans=spans)]
        return Group(seq=self.seq, attempt=self.ticket.attempt, task=self.ticket.task, samples=samples)


class SimulatedGroups(dict[int, SimulatedGroup]):
    """Groups that a batch may still contain, by sequence number. Draws the lengths of new groups."""

    def __init__(self, context: SimulationContext) -> None:
        super().__init__()
        self._settings = context.settings
        self._lengths = context.timings.lengths
        self._generator = context.generator
        self._next_lengths: list[list[float]] = []
        """Lengths of the samples of future groups, the next group last."""
        self._drawn_groups = 0

    def get_or_create(self, seq: int) -> SimulatedGroup:
        """Return the group as its last attempt left it, or a new one."""
        group = self.get(seq)
        if group is None:
            if not self._next_lengths:
                self._draw_lengths()
            group = SimulatedGroup(seq, self._next_lengths.pop(), self._settings.group_size)
            self[seq] = group
        return group

    def drop_untrained(self, group: SimulatedGroup) -> None:
        """Drop a group that ended untrained. With `regenerates_stale` the next new group gets its lengths."""
        dropped = self.pop(group.seq, None)
        # The group may be gone already. Its lengths must not be used twice.
        if dropped is not None and self._settings.regenerates_stale:
            self._next_lengths.append([sample.generated_tokens for sample in group.samples])

    def _draw_lengths(self) -> None:
        lengths = self._lengths.draw_groups(
            self._generator, GROUPS_PER_DRAW, self._settings.samples_started_per_group, first=self._drawn_groups
        )
        self._next_lengths = lengths[::-1].tolist()
        self._drawn_groups += GROUPS_PER_DRAW
