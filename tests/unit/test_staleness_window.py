"""The arithmetic of the staleness bound."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.staleness.window import StalenessWindow, age, can_admit, is_stale
from buffer.selection import select_fifo


def test_on_policy_training_has_room_for_one_batch() -> None:
    assert StalenessWindow(max_staleness=0, groups_per_step=4, horizon=40).capacity == 4


@pytest.mark.parametrize(
    ("admitted", "released", "discarded", "possible"),
    [
        (0, 0, 0, 6),
        (6, 0, 0, 0),
        (6, 2, 0, 2),
        (7, 0, 0, 0),
        (18, 14, 0, 2),  # the horizon: 20 groups in all
        (20, 20, 0, 0),
        (20, 20, 3, 3),  # three of them were not trained
    ],
)
def test_admission_is_bounded_by_the_window_and_by_the_horizon(
    admitted: int, released: int, discarded: int, possible: int
) -> None:
    window = StalenessWindow(max_staleness=2, groups_per_step=2, horizon=20)
    assert can_admit(window, admitted=admitted, released=released, discarded=discarded) == possible


def test_age_is_never_negative() -> None:
    assert [age(trainer, oldest) for trainer, oldest in [(5, 5), (5, 3), (3, 5)]] == [0, 2, 0]


def test_a_group_is_stale_beyond_s_and_not_at_s() -> None:
    window = StalenessWindow(max_staleness=2, groups_per_step=1, horizon=10)
    assert [is_stale(window, trainer_version=5, oldest_version=oldest) for oldest in (2, 3, 4)] == [True, False, False]


@pytest.mark.parametrize(
    ("open_groups", "chosen", "stale"),
    [
        ([(0, 3), (1, 3), (2, 3)], [0, 1], []),
        ([(0, 3), (1, None), (2, 3)], [], []),
        ([(0, 3)], [], []),
        ([(0, 1), (1, 3), (2, 2)], [1, 2], [0]),
        ([(0, 1), (1, 3), (2, None)], [], [0]),
        ([], [], []),
    ],
)
def test_fifo_takes_the_first_groups_that_are_young_enough(
    open_groups: list[tuple[int, int | None]], chosen: list[int], stale: list[int]
) -> None:
    window = StalenessWindow(max_staleness=1, groups_per_step=2, horizon=10)
    selection = select_fifo(window, trainer_version=3, open_groups=open_groups)
    assert (selection.chosen, selection.stale) == (chosen, stale)


@given(st.integers(0, 4), st.integers(1, 4), st.integers(0, 10**6))
def test_whatever_is_discarded_no_group_is_trained_at_an_age_above_s(staleness: int, size: int, seed: int) -> None:
    """Greedy admission, groups as old as their tickets, discards at random: age <= S, with nothing stale."""
    random = Random(seed)
    window = StalenessWindow(staleness, size, horizon=1000)
    admitted = released = discarded = 0
    open_groups: list[tuple[int, int]] = []
    for version in range(8):
        while len(open_groups) < size or random.random() < 0.5:
            for _ in range(can_admit(window, admitted=admitted, released=released, discarded=discarded)):
                if random.random() < 0.3:
                    released, discarded = released + 1, discarded + 1
                else:
                    open_groups.append((admitted, version))
                admitted += 1
        selection = select_fifo(window, trainer_version=version, open_groups=open_groups)
        assert not selection.stale
        del open_groups[:size]
        released += size
