"""Fair share of the room among servers that wait for groups. Pure.

The next group always goes to the waiting server with the largest fraction of its slots free. So servers with fewer
leases catch up first (a new server gets everything until it has as many as the others), servers with more slots get
more, and no room is reserved for a server that does not wait (it is full, paused or stopped).

    room 8    A: 6 of 16 slots free   B: 16 of 16 free     B gets 8: it then has 8 leases, and A has 10
    room 14   the same                                     B gets 12, A gets 2: both have 12

A server cannot see when another one stops waiting, for instance because it was killed. So a server that finds only
reserved room retries after FAIR_WAIT_S, and room is no longer reserved for servers without a request in that time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

FAIR_WAIT_S = 0.2
"""Seconds for which room stays reserved for a server that does not request it. Live servers retry within
milliseconds."""


@dataclass(frozen=True, slots=True)
class WaitingServer:
    """A server that waits for groups. Units are groups."""

    wanted: int
    """Free slots; at least 1, at most `slots`."""
    slots: int
    request_number: int = 0
    """Number of its last request, counted over the unserved requests of all servers."""

    def with_leases(self, count: int) -> WaitingServer:
        """The same server with `count` leases now: some that it had at its request may have ended."""
        return replace(self, wanted=max(self.wanted, self.slots - count))


def fair_share(requesting: WaitingServer, others: Iterable[WaitingServer], room: int) -> int:
    """Number of groups for the requesting server, if there are `room` for it and the other waiting servers.

    Servers with equal fractions of free slots are served in the order of their requests.

    >>> fair_share(WaitingServer(wanted=6, slots=16), [WaitingServer(wanted=16, slots=16)], room=14)
    2
    """
    waiting = list(others)

    # Binary search for the largest count whose last group still fits: all groups that go before it need room, too.
    low = 0
    high = min(requesting.wanted, room)
    while low < high:
        count = (low + high + 1) // 2
        free = requesting.wanted - count + 1
        groups_before = sum(_groups_before(other, free, requesting.slots) for other in waiting)
        if groups_before + count <= room:
            low = count
        else:
            high = count - 1
    return low


def _groups_before(other: WaitingServer, free: int, slots: int) -> int:
    """Number of groups that `other` gets while a larger fraction of its slots is free than `free` of `slots`."""
    # ceil((wanted * slots - free * other.slots) / slots) in integers
    groups = -(-(other.wanted * slots - free * other.slots) // slots)
    return max(0, min(other.wanted, groups))
