"""The next group always goes to the waiting server with the largest fraction of its slots free."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from buffer.fair_share import WaitingServer, fair_share

SERVERS = st.integers(1, 40).flatmap(
    lambda slots: st.integers(1, slots).map(lambda wanted: WaitingServer(wanted, slots))
)


def deal_groups_one_by_one(requesting: WaitingServer, others: list[WaitingServer], room: int) -> int:
    """Reference: deal out one group at a time. The requesting server goes first among equals."""
    free = [requesting.wanted, *(other.wanted for other in others)]
    slots = [requesting.slots, *(other.slots for other in others)]
    for _ in range(room):
        fractions = [Fraction(count, size) for count, size in zip(free, slots, strict=True)]
        emptiest = fractions.index(max(fractions))
        if free[emptiest] == 0:
            break
        free[emptiest] -= 1
    return requesting.wanted - free[0]


@settings(deadline=None)
@given(SERVERS, st.lists(SERVERS, max_size=5), st.integers(0, 100))
def test_fair_share_equals_dealing_groups_one_by_one(
    requesting: WaitingServer, others: list[WaitingServer], room: int
) -> None:
    assert fair_share(requesting, others, room) == deal_groups_one_by_one(requesting, others, room)


@settings(deadline=None)
@given(st.lists(SERVERS, min_size=1, max_size=6), st.integers(1, 100))
def test_some_server_gets_a_group_while_there_is_room(waiting: list[WaitingServer], room: int) -> None:
    shares = [
        fair_share(requesting, [other for other in waiting if other is not requesting], room) for requesting in waiting
    ]
    assert max(shares) > 0
