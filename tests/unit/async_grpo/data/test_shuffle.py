"""The order of rows: one permutation per pass, a pure function of the position, in constant memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.data.shuffle import Permutation, ShuffledPasses


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 300), key=st.text(max_size=20))
def test_positions_map_to_distinct_images(size: int, key: str) -> None:
    permutation = Permutation(size, key)
    assert sorted(permutation(position) for position in range(size)) == list(range(size))


def test_another_key_is_another_permutation() -> None:
    orders = {tuple(Permutation(40, f"seed {seed}")(position) for position in range(40)) for seed in range(200)}
    assert len(orders) == 200


def test_every_image_is_reached_from_every_position() -> None:
    """Over 2,000 keys each of 8 x 8 pairs comes up 250 times on average; 6 standard deviations are 89."""
    counts = [[0] * 8 for _ in range(8)]
    for key in range(2000):
        permutation = Permutation(8, str(key))
        for position in range(8):
            counts[position][permutation(position)] += 1
    assert all(161 <= count <= 339 for row in counts for count in row)


@given(size=st.integers(1, 2**62), data=st.data())
def test_permutations_of_any_size_need_no_table(size: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, size - 1))
    assert 0 <= Permutation(size, "key")(position) < size


@pytest.mark.parametrize("position", [-1, 10])
def test_a_position_outside_the_range_is_refused(position: int) -> None:
    with pytest.raises(IndexError, match=r"range\(10\)"):
        Permutation(10, "key")(position)


def test_a_row_depends_only_on_seed_and_index() -> None:
    forward, backward = ShuffledPasses(7, seed=1, shuffle=True), ShuffledPasses(7, seed=1, shuffle=True)
    indices = range(50)
    assert [forward.row_at(index) for index in indices] == [backward.row_at(index) for index in reversed(indices)][::-1]
    assert [forward.row_at(index) for index in indices] != [
        ShuffledPasses(7, seed=2, shuffle=True).row_at(index) for index in indices
    ]


def test_passes_visit_each_row_once_shuffled_or_in_file_order() -> None:
    passes = ShuffledPasses(30, seed=1, shuffle=True)
    orders = [[passes.row_at(number * 30 + position) for position in range(30)] for number in range(3)]
    assert all(sorted(order) == list(range(30)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    passes = ShuffledPasses(3, seed=1, shuffle=False)
    assert [passes.row_at(index) for index in range(7)] == [0, 1, 2, 0, 1, 2, 0]
