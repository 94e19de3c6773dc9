"""What the buffer of one process knows of a group and of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from async_grpo.wire import Batch, Group, Partial, Task


@dataclass(slots=True)
class ActiveGroup:
    """An active group, INFLIGHT while `group` is None. `deadline_s` is 0 if it was given back and has no holder."""

    task: Task
    begun: int
    """While INFLIGHT, no reported token is older than this version."""
    attempt: int = 0
    strikes: int = 0
    """Number of attempts that their holder, or its engine, did not survive."""
    holder: str = ""
    """Who holds the lease, also after it has expired; "" if nobody does."""
    deadline_s: float = 0.0
    partial: Partial | None = None
    group: Group | None = None
    longest: int = 0
    """Tokens of the longest completion reported so far."""
    uses: int = 0
    """Number of times that it was taken."""


@dataclass(slots=True)
class TakenStep:
    """The batch taken for a step, kept until a checkpoint contains it."""

    epoch: int
    mask_below: int
    size: int
    """Number of groups of the complete batch."""
    groups: dict[int, Group] = field(default_factory=dict)
    settled: bool = False

    @property
    def missing(self) -> int:
        """Number of groups still to come."""
        return self.size - len(self.groups)

    def batch(self, epoch: int, version: int, have: int) -> Batch:
        """What a trainer that has the first `have` groups gets."""
        return Batch(
            epoch=epoch,
            version=version,
            groups=list(self.groups.values())[have:],
            replayed=self.epoch < epoch,
            mask_below=self.mask_below,
            missing=self.missing,
        )


def length_bucket(tokens: int) -> int:
    """The smallest power of two that is at least `tokens` (which is at least 1)."""
    return 1 << (tokens - 1).bit_length()
