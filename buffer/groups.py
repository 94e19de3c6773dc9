"""State of a group and of a batch in the buffer of one process (`BufferState`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from async_grpo.wire import Batch, Group, Partial, Task


@dataclass(slots=True)
class ActiveGroup:
    """An active group. It is INFLIGHT while `group` is None.

    deadline_s  None       never leased, or given back: no holder
                in future  leased by `holder`
                in past    expired; `holder` may still insert, until another holder takes over
    """

    task: Task
    start_version: int
    """While INFLIGHT, a version that none of the reported tokens is older than."""
    attempt: int = 0
    """Number of leases so far."""
    expired_leases: int = 0
    """Number of leases that expired, or whose engine died."""
    holder: str | None = None
    """Holder of the lease, also after it has expired."""
    deadline_s: float | None = None
    partial: Partial | None = None
    group: Group | None = None
    longest: int = 0
    """Tokens of the longest completion reported so far."""
    uses: int = 0
    """Number of times that the group was taken."""


@dataclass(slots=True)
class TakenStep:
    """The batch taken for a step, retained until a committed checkpoint contains the step."""

    epoch: int
    mask_below: int
    size: int
    """Number of groups of the complete batch."""
    groups: dict[int, Group] = field(default_factory=dict)
    is_trained: bool = False

    @property
    def missing(self) -> int:
        """Number of groups still to come."""
        return self.size - len(self.groups)

    def batch(self, epoch: int, version: int, have: int) -> Batch:
        """Return the groups after the first `have`, which the trainer of `epoch` has already."""
        return Batch(
            epoch=epoch,
            version=version,
            groups=list(self.groups.values())[have:],
            replayed=self.epoch < epoch,
            mask_below=self.mask_below,
            missing=self.missing,
        )


def length_bucket(tokens: int) -> int:
    """Return the smallest power of two that is at least `tokens`, which is at least 1."""
    return 1 << (tokens - 1).bit_length()
