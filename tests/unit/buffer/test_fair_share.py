"""The next group always goes to the waiting server with the largest share of its slots free."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from buffer.fair_share import WaitingServer, fair_share

SERVERS = st.integers(1, 40).flatmap(
    lambda slots: st.integers(1, slots).map(lambda wanted: WaitingServer(wanted, slots))
)


def deal_out(asking: WaitingServer, others: list[WaitingServer], room: int) -> int:
    """The same, group by group; the server that asks comes before others with an equal share."""
    free = [asking.wanted, *(other.wanted for other in others)]
    slots = [asking.slots, *(other.slots for other in others)]
    for _ in range(room):
        shares = [Fraction(count, size) for count, size in zip(free, slots, strict=True)]
        neediest = shares.index(max(shares))
        if free[neediest] == 0:
            break
        free[neediest] -= 1
    return asking.wanted - free[0]


@settings(deadline=None)
@given(SERVERS, st.lists(SERVERS, max_size=5), st.integers(0, 100))
def test_a_share_is_what_dealing_out_group_by_group_gives(
    asking: WaitingServer, others: list[WaitingServer], room: int
) -> None:
    assert fair_share(asking, others, room) == deal_out(asking, others, room)


@settings(deadline=None)
@given(st.lists(SERVERS, min_size=1, max_size=6), st.integers(1, 100))
def test_someone_always_gets_a_group_while_there_is_room(waiting: list[WaitingServer], room: int) -> None:
    shares = [fair_share(asking, [other for other in waiting if other is not asking], room) for asking in waiting]
    assert max(shares) > 0
