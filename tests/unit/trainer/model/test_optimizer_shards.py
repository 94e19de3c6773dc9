"""A range of the elements of a tensor as boxes, which is how a rank stores its share of the optimizer."""

from __future__ import annotations

import math
import random

import pytest
import torch

from trainer.model.optimizer_shards import boxes_of_range


@pytest.mark.parametrize("shape", [(), (7,), (5, 4), (1, 6), (6, 1), (3, 4, 5), (1, 3, 2, 4)])
def test_boxes_hold_the_elements_of_their_range_once_and_in_order(shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    whole = torch.arange(count).reshape(shape)
    for start in range(count + 1):
        for stop in range(start, count + 1):
            boxes = list(boxes_of_range(shape, start, stop))
            pieces = []
            for offset, size in boxes:
                slices = tuple(slice(first, first + length) for first, length in zip(offset, size, strict=True))
                pieces.append(whole[slices].flatten())
            elements = torch.cat([torch.arange(0), *pieces])
            assert elements.tolist() == list(range(start, stop))
            assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_whole_tensor_is_one_box() -> None:
    assert list(boxes_of_range((3, 4, 5), 0, 60)) == [((0, 0, 0), (3, 4, 5))]


def test_neighbouring_ranges_share_no_element() -> None:
    cuts = sorted(random.Random(1).sample(range(1, 120), 5))
    taken = torch.zeros(8, 15)
    for start, stop in zip([0, *cuts], [*cuts, 120], strict=True):
        for (row, column), (rows, columns) in boxes_of_range((8, 15), start, stop):
            taken[row : row + rows, column : column + columns] += 1
    assert torch.equal(taken, torch.ones(8, 15))
