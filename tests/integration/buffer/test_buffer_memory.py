"""The server's memory, its keys and its file stay flat however many groups go through."""

from __future__ import annotations

import pytest

from tests.support.buffer_memory import LARGE, SMALL, Look, rounds_of, run_rounds

GROWTH_MB = 0.5
"""Of an idle server: its own log of the newest 128 large replies, 0.12 MB, and what the allocator rounds up."""
REWRITE_AT_MB = 64.0
"""Size of the file at which the server first rewrites it."""


def check(looks: list[Look]) -> None:
    """The first look is after the warm-up, at the same state as every other."""
    first = looks[0]
    for look in looks[1:]:
        assert look.keys == first.keys
        assert abs(look.used_mb - first.used_mb) < GROWTH_MB
    small = [look for look in looks if look.group_kb < 10]
    assert max(look.most_file_mb for look in small[:-1]) < 1.5 * REWRITE_AT_MB


@pytest.mark.slow
def test_fifty_thousand_groups_leave_nothing_behind() -> None:
    looks = run_rounds(rounds_of(50_000, 2_000, looks=10))
    check(looks)
    assert looks[-1].groups > 50_000
    assert max(look.most_file_mb for look in looks) < 8 * REWRITE_AT_MB


def test_hundreds_of_groups_leave_no_key_behind() -> None:
    check(run_rounds([(320, SMALL), (320, SMALL), (48, LARGE), (80, SMALL)]))
