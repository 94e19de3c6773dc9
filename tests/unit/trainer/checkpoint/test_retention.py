"""Which checkpoints are deleted after one was saved."""

from __future__ import annotations

import pytest

from trainer.checkpoint.folder import find_outdated_versions, find_protected_versions, rank_versions


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
    assert find_outdated_versions(versions, saved=saved, keep=keep) == deleted


def test_what_is_spared_stays_however_old_and_never_instead_of_a_newer_one() -> None:
    assert find_outdated_versions([2, 4, 6, 8], saved=8, keep=2, protected=[2]) == [4]
    assert find_outdated_versions([2, 4, 6, 8], saved=4, keep=2, protected=[8]) == [6, 8]


@pytest.mark.parametrize(
    ("accuracies", "best_first"),
    [
        ({}, []),
        ({10: 0.5, 20: 0.7, 30: 0.6}, [20, 30, 10]),
        ({10: 0.7, 20: 0.7}, [20, 10]),
        ({0: 0.9, 9: 0.9}, []),
        ({13: 0.5, 17: 0.9}, [10]),
        ({20: 0.1, 25: 0.9, 30: 0.2}, [30, 20]),
        ({39: 0.5, 40: 0.9}, [30]),
    ],
    ids=["none", "each", "equal", "before the first", "late", "the first counts", "too late"],
)
def test_checkpoints_are_ranked_by_the_evaluation_that_belongs_to_them(
    accuracies: dict[int, float], best_first: list[int]
) -> None:
    assert rank_versions([10, 20, 30], accuracies, span=10) == best_first


def test_without_keep_best_nothing_is_spared() -> None:
    assert find_protected_versions([10, 20], {10: 0.9}, span=10, keep=1, keep_best=0) == []


def test_one_that_waits_for_its_evaluation_is_spared_but_not_without_end() -> None:
    assert find_protected_versions([10, 20, 30, 40, 50], {}, span=10, keep=1, keep_best=2) == [40, 30]
    assert find_protected_versions([10, 20, 30, 40, 50], {40: 0.1, 20: 0.5}, span=10, keep=1, keep_best=2) == [20, 40]
