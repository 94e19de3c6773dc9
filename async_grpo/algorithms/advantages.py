"""Advantages of the samples of a batch, relative to their group.

Shapes: rewards_BG float, valid_BG bool, lengths_BG trained tokens (B groups of at most G samples). A sample
that is not valid (no verifier could judge it, or there is none in this place) has no part in any statistic, and
its advantage is 0. A group with a single valid sample has nothing to be compared with: its baseline is 0 and its
deviation 1.

All rules see the rewards of the whole batch, on every rank: those that whiten over the batch need no
communication, and none depends on micro-batches or ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EPS = 1e-6
"""Keeps equal rewards at advantage 0 instead of 0 / 0."""
LEAST_VARIANCE = 1e-8
"""Least variance of reinforce_pp_baseline, for the same reason."""

Advantage = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rewards_BG, valid_BG, lengths_BG) -> advantages_BG, float64. Also the signature of a user's own."""


def grpo(rewards_BG: Tensor, valid_BG: Tensor, lengths_BG: Tensor) -> Tensor:
    """(R - mean) / (std + 1e-6), unbiased std of the group: GRPO, DeepSeekMath, arXiv 2402.03300.

    >>> grpo(torch.tensor([[1.0, 0.0]]), torch.tensor([[True, True]]), torch.ones(1, 2))
    tensor([[ 0.7071, -0.7071]])
    """
    return dr_grpo(rewards_BG, valid_BG, lengths_BG) / (_deviation(rewards_BG, valid_BG) + EPS)


def dr_grpo(rewards_BG: Tensor, valid_BG: Tensor, lengths_BG: Tensor) -> Tensor:
    """R - mean: Dr. GRPO, arXiv 2503.20783."""
    return _less(rewards_BG, valid_BG, _mean(rewards_BG, valid_BG))


def rloo(rewards_BG: Tensor, valid_BG: Tensor, lengths_BG: Tensor) -> Tensor:
    """R - mean of the others: leave-one-out, arXiv 2402.14740."""
    kept_BG = _kept(rewards_BG, valid_BG)
    others_B1 = valid_BG.sum(-1, keepdim=True) - 1
    baseline_BG = (kept_BG.sum(-1, keepdim=True) - kept_BG) / others_B1.clamp(min=1)
    return _kept(rewards_BG - baseline_BG, valid_BG)


def reinforce_pp_baseline(rewards_BG: Tensor, valid_BG: Tensor, lengths_BG: Tensor) -> Tensor:
    """D = R - mean of the group, then (D - mean(D)) / std(D) over the tokens of the batch: REINFORCE++ with baseline,
    arXiv 2501.03262.

    The paper's batch is one of tokens, D of a token being that of its sample, so a sample counts by its length. Its
    authors' code (OpenRLHF) settles what the paper leaves open: the variance is that of the population, at least 1e-8.
    """
    centred_BG = dr_grpo(rewards_BG, valid_BG, lengths_BG)
    share_BG = _kept(lengths_BG.to(centred_BG.dtype), valid_BG)
    share_BG = share_BG / share_BG.sum().clamp(min=1)
    moved_BG = _kept(centred_BG - (share_BG * centred_BG).sum(), valid_BG)
    variance = (share_BG * moved_BG.square()).sum()
    return moved_BG / variance.clamp(min=LEAST_VARIANCE).sqrt()


def opo(rewards_BG: Tensor, valid_BG: Tensor, lengths_BG: Tensor) -> Tensor:
    """R - sum(len * R) / sum(len): the baseline of least variance, OPO, arXiv 2505.23585."""
    tokens_BG = _kept(lengths_BG.to(rewards_BG.dtype), valid_BG)
    weighted_B1 = (tokens_BG * _kept(rewards_BG, valid_BG)).sum(-1, keepdim=True)
    return _less(rewards_BG, valid_BG, weighted_B1 / tokens_BG.sum(-1, keepdim=True).clamp(min=1))


def opob(rewards_BG: Tensor, valid_BG: Tensor, lengths_BG: Tensor) -> Tensor:
    """(R - b) / (std + 1e-6), b = sum(n * R) / sum(n), n = len * w^2: the off-policy optimal baseline of VCPO, arXiv
    2602.17616.

    n is given in place of the lengths; w is the importance weight of the whole sample. The paper's n is w^2 times the
    squared norm of the gradient of log pi; the length stands for that norm, as in OPO. The deviation is that of GRPO
    (the authors' scripts set norm_by_std).
    """
    largest_B1 = _kept(lengths_BG, valid_BG).amax(-1, keepdim=True)
    shares_BG = lengths_BG / torch.where(largest_B1 > 0, largest_B1, torch.ones_like(largest_B1))
    return opo(rewards_BG, valid_BG, shares_BG) / (_deviation(rewards_BG, valid_BG) + EPS)


def lite_ppo(rewards_BG: Tensor, valid_BG: Tensor, lengths_BG: Tensor) -> Tensor:
    """(R - mean of the group) / (std of the rewards of the batch + 1e-6): Lite PPO, arXiv 2508.08221."""
    deviation_11 = _deviation(rewards_BG.reshape(1, -1), valid_BG.reshape(1, -1))
    return dr_grpo(rewards_BG, valid_BG, lengths_BG) / (deviation_11 + EPS)


ADVANTAGES: dict[str, Advantage] = {
    rule.__name__: rule for rule in (grpo, dr_grpo, rloo, reinforce_pp_baseline, opo, opob, lite_ppo)
}
"""Rule by its name in the configuration."""


def _kept(values_BG: Tensor, valid_BG: Tensor) -> Tensor:
    """The values, with 0 where they are not valid (also in place of NaN)."""
    return torch.where(valid_BG, values_BG, torch.zeros_like(values_BG))


def _mean(values_BG: Tensor, valid_BG: Tensor) -> Tensor:
    """Mean of each row's valid values, [B, 1]."""
    return _kept(values_BG, valid_BG).sum(-1, keepdim=True) / valid_BG.sum(-1, keepdim=True).clamp(min=1)


def _deviation(values_BG: Tensor, valid_BG: Tensor) -> Tensor:
    """Unbiased standard deviation of each row's valid values, [B, 1]; 1 where there are fewer than two."""
    count_B1 = valid_BG.sum(-1, keepdim=True)
    squares_B1 = _kept(values_BG - _mean(values_BG, valid_BG), valid_BG).square().sum(-1, keepdim=True)
    variance_B1 = squares_B1 / (count_B1 - 1).clamp(min=1)
    return torch.where(count_B1 > 1, variance_B1.sqrt(), torch.ones_like(variance_B1))


def _less(rewards_BG: Tensor, valid_BG: Tensor, baseline_B1: Tensor) -> Tensor:
    """R - baseline, where the baseline of a lone valid sample is 0."""
    lone_B1 = valid_BG.sum(-1, keepdim=True) <= 1
    return _kept(rewards_BG - torch.where(lone_B1, torch.zeros_like(baseline_B1), baseline_B1), valid_BG)
