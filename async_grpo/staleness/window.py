"""The staleness bound, as arithmetic.

Symbols (the same in docs/staleness.md and in the Lua scripts):

    S         max_staleness            P    groups_per_step        v    published policy version
    admitted  groups ever admitted     released  groups ever released     active = admitted - released

    admission:  active < (S + 1) * P        so that always       active <= (S + 1) * P
    age:        trainer version - version of the oldest token    <= S

Why the age is bounded when groups are trained in order of admission: let group s (counted from 0)
be admitted at version v, when `released = v*P + d`, d of them discarded untrained. Admission needs
s - (v*P + d) < (S+1)*P. It is trained at version v' only after v'*P others before it, and d of the
s groups before it never will be, so v'*P <= s - d < (v + S + 1)*P, that is v' - v <= S. No token of
the group is older than v, because a server starts it only with weights of version >= v.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StalenessWindow:
    """The dials: S, P and the horizon H: how often, in total, the run trains a group (steps * P)."""

    max_staleness: int
    groups_per_step: int
    horizon: int

    @property
    def capacity(self) -> int:
        """(S + 1) * P groups."""
        return (self.max_staleness + 1) * self.groups_per_step


def age(trainer_version: int, oldest_version: int) -> int:
    """Age in optimizer steps of tokens sampled from `oldest_version` when trained at `trainer_version`.

    A trainer that replays steps after a crash may meet tokens of a version that it has not reached
    again: their age is 0.
    """
    return max(0, trainer_version - oldest_version)
