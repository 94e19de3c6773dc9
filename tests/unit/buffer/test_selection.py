"""Selection of the groups of the next batch."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest

from async_grpo.staleness import SELECTORS, OnStale, Selector
from async_grpo.wire import Group, Task, tokens_to_bytes
from buffer.selection import select_groups, too_old_to_finish, too_old_to_train
from tests.support.buffer_cases import mixed_sample, policy

FIFO, FRESHEST, UNIFORM = (
    policy(S=3, P=2),
    policy(S=3, P=2, selector="freshest"),
    policy(S=3, P=2, selector="uniform"),
)


def groups(picture: str) -> list[tuple[int, bool]]:
    """ "R.R": groups 0 and 2 are READY, group 1 is in flight; a space is a group that has ended."""
    return [(seq, state == "R") for seq, state in enumerate(picture) if state != " "]


def group(oldest: int, newest: int) -> Group:
    task = Task(index=0, prompt="", prompt_tokens=tokens_to_bytes([1]), answer="")
    return Group(seq=0, attempt=1, task=task, samples=[mixed_sample(oldest, newest)])


def test_every_selector_has_a_description() -> None:
    assert tuple(SELECTORS) == get_args(Selector)


@pytest.mark.parametrize(
    ("picture", "chosen"), [("RRR", [0, 1]), (" RR", [1, 2]), ("R.R", [0]), ("R", [0]), (".RR", []), ("", [])]
)
def test_fifo_takes_the_first_groups_and_waits_for_unfinished_ones(picture: str, chosen: list[int]) -> None:
    assert select_groups(FIFO, 0, groups(picture), 2) == chosen


@pytest.mark.parametrize(
    ("picture", "chosen"),
    [
        ("RRRR", [0, 1]),
        (".RRR", [1, 2]),
        (". RR", [2]),  # group 3 lies beyond 0 + W
        ("R..R", [0, 3]),  # the window starts at the first group in flight, group 1
        ("R...R", [0]),
        ("..R R", [2]),
    ],
)
def test_windowed_fifo_lets_w_minus_1_groups_overtake_an_unfinished_one(picture: str, chosen: list[int]) -> None:
    settings = policy(S=3, P=2, selector="windowed_fifo", selector_window=3)
    assert select_groups(settings, 0, groups(picture), 2) == chosen


@pytest.mark.parametrize(("picture", "chosen"), [("RRRR", [2, 3]), ("R.R.", [0, 2]), ("R...", [0])])
def test_freshest_takes_the_highest_tickets(picture: str, chosen: list[int]) -> None:
    assert select_groups(FRESHEST, 0, groups(picture), 2) == chosen


def test_uniform_takes_every_ready_group_with_equal_frequency() -> None:
    counts = Counter(seq for step in range(3000) for seq in select_groups(UNIFORM, step, groups("R.RRR"), 2))
    assert set(counts) == {0, 2, 3, 4}
    assert all(abs(count - 1500) < 150 for count in counts.values())  # 5.5 standard deviations


def test_uniform_repeats_only_for_the_same_step_and_seed() -> None:
    other = policy(S=3, P=2, selector="uniform", seed=1)
    first, second = (
        [select_groups(settings, step, groups("RRRRRRRR"), 2) for step in range(20)] for settings in (UNIFORM, other)
    )
    assert first == [select_groups(UNIFORM, step, groups("RRRRRRRR"), 2) for step in range(20)]
    assert first != second


@pytest.mark.parametrize(
    ("rule", "too_old"),
    [("wait", [False] * 3), ("drop", [False, True, True]), ("mask", [False, False, True])],
)
def test_age_limit_of_ready_groups(rule: OnStale, too_old: list[bool]) -> None:
    """At version 5 with S = 2: all tokens young, some old, all old."""
    settings = policy(S=2, on_stale=rule)
    candidates = [group(3, 5), group(2, 3), group(1, 2)]
    assert [too_old_to_train(settings, 5, candidate) for candidate in candidates] == too_old


def test_only_drop_ends_groups_in_flight() -> None:
    by_rule = {rule: too_old_to_finish(policy(S=1, on_stale=rule), 5, 3) for rule in ("wait", "drop", "mask")}
    assert by_rule == {"wait": False, "drop": True, "mask": False}
    assert not too_old_to_finish(policy(S=1), 5, 4)
