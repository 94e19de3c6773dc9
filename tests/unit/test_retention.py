"""Which checkpoints are deleted after one was saved."""

from __future__ import annotations

import pytest

from trainer.retention import superfluous


@pytest.mark.parametrize(
    ("versions", "saved", "keep", "deleted"),
    [
        ([2], 2, 1, []),
        ([2, 4, 6], 6, 2, [2]),
        ([2, 4, 6], 6, 1, [2, 4]),
        ([6, 2, 4], 6, 5, []),
        ([2, 4, 6], 4, 1, [2, 6]),
        ([2, 4, 6, 8], 4, 2, [6, 8]),
    ],
)
def test_the_saved_one_and_those_before_it_stay_and_unmarked_ones_above_it_go(
    versions: list[int], saved: int, keep: int, deleted: list[int]
) -> None:
    assert superfluous(versions, saved=saved, keep=keep) == deleted
