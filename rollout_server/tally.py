"""What became of the groups of this server, counted since its engine was started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from async_grpo.wire import Sample


@dataclass(frozen=True, slots=True)
class Tally:
    """`groups` by outcome (inserted, interrupted, and the release reasons of discarded ones), `samples` of inserted
    groups by finish reason, `reward_failures` by kind."""

    groups: Counter[str] = field(default_factory=Counter)
    samples: Counter[str] = field(default_factory=Counter)
    reward_failures: Counter[str] = field(default_factory=Counter)

    def inserted(self, samples: Iterable[Sample]) -> None:
        """A group is in the buffer."""
        self.groups["inserted"] += 1
        self.samples.update(sample.finish_reason for sample in samples)
