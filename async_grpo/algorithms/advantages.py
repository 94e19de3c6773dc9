"""Advantages of the samples of a group, relative to that group.

Shapes: rewards_BG float, valid_BG bool (B groups of G samples). A sample that is not valid (no
verifier could judge it) has no part in the statistics of its group, and its advantage is 0.
A group with a single valid sample has nothing to be compared with: its baseline is 0 and its
deviation 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EPS = 1e-6
"""Keeps a group of equal rewards at advantage 0 instead of 0 / 0."""


def grpo(rewards_BG: Tensor, valid_BG: Tensor) -> Tensor:
    """(R - mean) / (std + 1e-6), unbiased std: GRPO, DeepSeekMath, arXiv 2402.03300.

    >>> grpo(torch.tensor([[1.0, 0.0]]), torch.tensor([[True, True]]))
    tensor([[ 0.7071, -0.7071]])
    """
    centred_BG = dr_grpo(rewards_BG, valid_BG)
    count_B1 = valid_BG.sum(-1, keepdim=True)
    variance_B1 = centred_BG.square().sum(-1, keepdim=True) / (count_B1 - 1).clamp(min=1)
    std_B1 = torch.where(count_B1 > 1, variance_B1.sqrt(), torch.ones_like(variance_B1))
    return centred_BG / (std_B1 + EPS)


def dr_grpo(rewards_BG: Tensor, valid_BG: Tensor) -> Tensor:
    """R - mean: Dr. GRPO, arXiv 2503.20783."""
    kept_BG = _kept(rewards_BG, valid_BG)
    count_B1 = valid_BG.sum(-1, keepdim=True)
    mean_B1 = kept_BG.sum(-1, keepdim=True) / count_B1.clamp(min=1)
    baseline_B1 = torch.where(count_B1 > 1, mean_B1, torch.zeros_like(mean_B1))
    return _kept(rewards_BG - baseline_B1, valid_BG)


def rloo(rewards_BG: Tensor, valid_BG: Tensor) -> Tensor:
    """R - mean of the others: leave-one-out, arXiv 2402.14740."""
    kept_BG = _kept(rewards_BG, valid_BG)
    others_B1 = valid_BG.sum(-1, keepdim=True) - 1
    baseline_BG = (kept_BG.sum(-1, keepdim=True) - kept_BG) / others_B1.clamp(min=1)
    return _kept(rewards_BG - baseline_BG, valid_BG)


def _kept(values_BG: Tensor, valid_BG: Tensor) -> Tensor:
    """Zero where not valid, whatever stands there (NaN too)."""
    return torch.where(valid_BG, values_BG, torch.zeros_like(values_BG))


ADVANTAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
"""Rule by its name in the configuration."""
