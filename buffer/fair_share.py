"""Which of the servers that wait for groups gets how many, while there is less room than they could hold. Pure.

The next group always goes to the waiting server with the largest share of its slots free. So servers that hold less
catch up first (one that has just joined gets everything until it holds as much as the others), servers with more slots
hold more, and one that does not wait (it is full, paused or stopped) keeps no room from the others.

    room 8    A: 6 of 16 slots free   B: 16 of 16 free     B gets 8: it then holds 8, and A holds 10
    room 14   the same                                     B gets 12, A gets 2: both hold 12

A server cannot see when another one stops waiting, for instance because it was killed. So whoever finds room that is
kept for others asks again after FAIR_WAIT_S, and those that have not asked meanwhile are no longer counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

FAIR_WAIT_S = 0.2
"""Seconds for which room is kept for a waiting server that does not ask for it. Servers answer within milliseconds."""


@dataclass(frozen=True, slots=True)
class WaitingServer:
    """A server that waits for groups. Units are groups."""

    wanted: int
    """Free slots; at least 1, at most `slots`."""
    slots: int
    asked: int = 0
    """Number of the request with which it asked last; requests of all servers are counted together."""

    def now_holding(self, groups: int) -> WaitingServer:
        """The same server, which holds so many groups now: some that it had when it asked may have ended."""
        return replace(self, wanted=max(self.wanted, self.slots - groups))


def fair_share(asking: WaitingServer, others: Iterable[WaitingServer], room: int) -> int:
    """Number of groups for the server that asks now, if there are `room` for it and the other waiting servers.

    Servers with equal shares of free slots are served in the order in which they ask.

    >>> fair_share(WaitingServer(wanted=6, slots=16), [WaitingServer(wanted=16, slots=16)], room=14)
    2
    """
    waiting, low, high = list(others), 0, min(asking.wanted, room)
    while low < high:
        count = (low + high + 1) // 2
        free = asking.wanted - count + 1
        before = sum(_groups_before(other, free, asking.slots) for other in waiting)
        if before + count <= room:
            low = count
        else:
            high = count - 1
    return low


def _groups_before(other: WaitingServer, free: int, slots: int) -> int:
    """Number of groups that another server gets before one with `free` of `slots` free: those at which it has a larger
    share free."""
    larger = -(-(other.wanted * slots - free * other.slots) // slots)
    return max(0, min(other.wanted, larger))
