"""Which groups make the next batch, decided from facts alone.

fifo: walk the open groups (INFLIGHT or READY) in ticket order; a group that is too old is dropped, and
the first one still in flight ends the walk. The batch is complete when P groups were passed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from async_grpo.staleness.window import StalenessWindow, is_stale


@dataclass(frozen=True, slots=True)
class Selection:
    """`chosen` is empty unless it is a whole batch; `stale` groups are to be released in any case."""

    chosen: list[int]
    stale: list[int]


def select_fifo(
    window: StalenessWindow, *, trainer_version: int, open_groups: Iterable[tuple[int, int | None]]
) -> Selection:
    """`open_groups`: (sequence, version of the oldest token or None while in flight), by sequence."""
    chosen: list[int] = []
    stale: list[int] = []
    for seq, oldest_version in open_groups:
        if len(chosen) == window.groups_per_step or oldest_version is None:
            break
        too_old = is_stale(window, trainer_version=trainer_version, oldest_version=oldest_version)
        (stale if too_old else chosen).append(seq)
    complete = len(chosen) == window.groups_per_step
    return Selection(chosen if complete else [], stale)
