"""Rows of kept tokens: sliced, joined, padded, and checked against the sampled tokens."""

from __future__ import annotations

import numpy as np

from async_grpo.wire.sampling_mask import COUNT_DTYPE, ID_DTYPE, SamplingMask, first_occurrences, join_masks


def mask_of(*rows: list[int]) -> SamplingMask:
    ids = [token for row in rows for token in row]
    return SamplingMask(np.array(ids, ID_DTYPE), np.array([len(row) for row in rows], COUNT_DTYPE))


def test_slices_joined_again_are_the_whole() -> None:
    whole = mask_of([7, 9, 4], [], [7], [3, 5])
    parts = [whole.slice_rows(0, 1), whole.slice_rows(1, 1), whole.slice_rows(1, 3), whole.slice_rows(3, 4)]
    joined = join_masks(parts)
    assert joined.token_ids.tolist() == whole.token_ids.tolist()
    assert joined.counts.tolist() == whole.counts.tolist()
    assert [len(part) for part in parts] == [1, 0, 2, 1]


def test_a_mask_survives_its_bytes() -> None:
    mask = mask_of([70_000, 1], [2])
    read = SamplingMask.from_bytes(mask.token_ids.tobytes(), mask.counts.tobytes())
    assert read.token_ids.tolist() == [70_000, 1, 2] and read.counts.tolist() == [2, 1]
    assert mask.nbytes == 3 * 4 + 2 * 2


def test_rows_are_padded_to_the_longest_chosen_one() -> None:
    mask = mask_of([7, 9, 4], [], [3, 5], [8])
    assert mask.pad_rows(np.array([3, 2])).tolist() == [[8, -1], [3, 5]]
    assert mask.pad_rows(np.array([1])).shape == (1, 0)
    assert mask.pad_rows(np.array([], np.int64)).shape == (0, 0)


def test_a_row_without_its_sampled_token_is_found() -> None:
    mask = mask_of([7, 9], [], [3, 5])
    assert mask.find_row_without(np.array([9, 1, 3], ID_DTYPE)) is None
    assert mask.find_row_without(np.array([9, 1, 7], ID_DTYPE)) == 2
    assert join_masks([]).find_row_without(np.array([], ID_DTYPE)) is None


def test_first_occurrences_of_tokens_before_a_position() -> None:
    tokens = np.array([4, 4, 9, 2], ID_DTYPE)
    assert first_occurrences(tokens, np.array([[4, 9, 2, 1, 100, -1]], ID_DTYPE)).tolist() == [[0, 2, 3, 4, 4, 4]]
