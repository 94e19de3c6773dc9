"""Tolerances that follow from dtype and magnitude, so that a test does not depend on one processor's kernels."""

from __future__ import annotations

import torch

SAFETY = 4.0


def assert_equal_up_to_rounding(result: torch.Tensor, expected: torch.Tensor, *, terms: int) -> None:
    """Assert that two tensors of one dtype differ by no more than rounding.

    Each element is a sum of about `terms` products. Kernels add them in different orders, so their rounding errors grow
    like a random walk: the machine epsilon times the square root of `terms`, relative to the largest element.
    """
    epsilon = torch.finfo(expected.dtype).eps
    largest = expected.abs().max().item() if expected.numel() else 0.0
    tolerance = SAFETY * epsilon * terms**0.5 * largest
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=0.0)
