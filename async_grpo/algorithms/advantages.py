"""Advantages of the samples of a batch, relative to their group.

Shapes: rewards_BG float, valid_BG bool, lengths_BG trained tokens (B groups of at most G samples). An invalid
sample (no verifier could judge it, or it pads a smaller group) is excluded from all statistics, and its advantage
is 0. A group with a single valid sample has no peers to compare with: its baseline is 0 and its standard deviation 1.

Every rank passes the rewards of the whole batch. Rules that whiten over the batch therefore need no communication, and
no rule depends on micro-batches or ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EPS = 1e-6
"""Added to a standard deviation. A group with equal rewards then has advantage 0, not 0 / 0."""
BATCH_EPS = 1e-5
"""The same for normalisation over the batch, as in AReaL."""
MIN_VARIANCE = 1e-8
"""Lower bound of the variance in reinforce_pp_baseline, so that a batch with equal rewards does not divide by 0."""

Advantage = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rewards_BG, valid_BG, lengths_BG) -> advantages_BG, float64. Also the signature of a custom function."""


def grpo(rewards_BG: Tensor, valid_BG: Tensor, lengths_BG: Tensor) -> Tensor:
    """(R - mean) / (std + 1e-6), unbiased standard deviation of the group: GRPO, DeepSeekMath, arXiv 2402.03300.

    >>> grpo(torch.tensor([[1.0, 0.0]]), torch.tensor([[True, True]]), torch.ones(1, 2))
    tensor([[ 0.7071, -0.7071]])
    """
    return dr_grpo(rewards_BG, valid_BG, lengths_BG) / (_std(rewards_BG, valid_BG) + EPS)


def dr_grpo(rewards_BG: Tensor, valid_BG: Tensor, lengths_BG: Tensor) -> Tensor:
    """R - mean: Dr. GRPO, arXiv 2503.20783."""
    return _subtract_baseline(rewards_BG, valid_BG, _mean(rewards_BG, valid_BG))


def rloo(rewards_BG: Tensor, valid_BG: Tensor, lengths_BG: Tensor) -> Tensor:
    """R - mean of the group's other samples: leave-one-out, arXiv 2402.14740."""
    valid_rewards_BG = _zero_invalid(rewards_BG, valid_BG)
    others_B1 = valid_BG.sum(-1, keepdim=True) - 1
    baseline_BG = (valid_rewards_BG.sum(-1, keepdim=True) - valid_rewards_BG) / others_B1.clamp(min=1)
    return _zero_invalid(rewards_BG - baseline_BG, valid_BG)


def reinforce_pp_baseline(rewards_BG: Tensor, valid_BG: Tensor, lengths_BG: Tensor) -> Tensor:
    """D = R - mean of the group, then (D - mean(D)) / std(D) over the tokens of the batch: REINFORCE++ with baseline,
    arXiv 2501.03262.

    The paper takes mean and std over tokens, each token having the D of its sample. A sample therefore counts in
    proportion to its length. Two details are from the authors' code (OpenRLHF): the variance is the population
    variance, and it is at least 1e-8.
    """
    centred_BG = dr_grpo(rewards_BG, valid_BG, lengths_BG)

    # Weight of each sample in the batch statistics: its fraction of the batch's tokens.
    weight_BG = _zero_invalid(lengths_BG.to(centred_BG.dtype), valid_BG)
    weight_BG = weight_BG / weight_BG.sum().clamp(min=1)

    whitened_BG = _zero_invalid(centred_BG - (weight_BG * centred_BG).sum(), valid_BG)
    variance = (weight_BG * whitened_BG.square()).sum()
    return whitened_BG / variance.clamp(min=MIN_VARIANCE).sqrt()


def opo(rewards_BG: Tensor, valid_BG: Tensor, lengths_BG: Tensor) -> Tensor:
    """R - sum(len * R) / sum(len): the minimum-variance baseline, OPO, arXiv 2505.23585."""
    tokens_BG = _zero_invalid(lengths_BG.to(rewards_BG.dtype), valid_BG)
    weighted_B1 = (tokens_BG * _zero_invalid(rewards_BG, valid_BG)).sum(-1, keepdim=True)
    return _subtract_baseline(rewards_BG, valid_BG, weighted_B1 / tokens_BG.sum(-1, keepdim=True).clamp(min=1))


def opob(rewards_BG: Tensor, valid_BG: Tensor, lengths_BG: Tensor) -> Tensor:
    """(R - b) / (std + 1e-6), b = sum(n * R) / sum(n), n = len * w^2: the off-policy optimal baseline of VCPO, arXiv
    2602.17616.

    `lengths_BG` carries n instead of the lengths; w is the importance weight of the sample. The paper's n is w^2 times
    the squared norm of the gradient of log pi; the length approximates that norm, as in OPO. The standard deviation is
    the same as in `grpo` (the authors' scripts set norm_by_std).
    """
    # Only the ratios of n within a group matter. `opo` clamps the sum of its weights at 1, which is meant for lengths
    # and would change small n, so we scale the largest n of each group to 1.
    largest_B1 = _zero_invalid(lengths_BG, valid_BG).amax(-1, keepdim=True)
    relative_BG = lengths_BG / torch.where(largest_B1 > 0, largest_B1, torch.ones_like(largest_B1))
    return opo(rewards_BG, valid_BG, relative_BG) / (_std(rewards_BG, valid_BG) + EPS)


def lite_ppo(rewards_BG: Tensor, valid_BG: Tensor, lengths_BG: Tensor) -> Tensor:
    """(R - mean of the group) / (std of the batch's rewards + 1e-6): Lite PPO, arXiv 2508.08221."""
    std_11 = _std(rewards_BG.reshape(1, -1), valid_BG.reshape(1, -1))
    return dr_grpo(rewards_BG, valid_BG, lengths_BG) / (std_11 + EPS)


def maxrl(rewards_BG: Tensor, valid_BG: Tensor, lengths_BG: Tensor) -> Tensor:
    """(R - mean) / mean of the group, 0 where the mean is not positive: MaxRL, arXiv 2602.02710.

    For rewards 0 and 1 the expected update is the gradient of a truncated series of log pass-rate, so rare successes
    count more.
    """
    mean_B1 = _mean(rewards_BG, valid_BG)
    centred_BG = dr_grpo(rewards_BG, valid_BG, lengths_BG)
    return torch.where(mean_B1 > 0, centred_BG / torch.where(mean_B1 > 0, mean_B1, 1.0), 0.0)


def reinforce_pp(rewards_BG: Tensor, valid_BG: Tensor, lengths_BG: Tensor) -> Tensor:
    """R: REINFORCE++ without a group baseline, arXiv 2501.03262. Combine it with `advantage_norm: batch`, and with
    `kl_in: reward`, which then subtracts the divergence of a token and of those after it from the token's advantage."""
    return _zero_invalid(rewards_BG, valid_BG)


def gdpo(parts_KBG: Tensor, weights_K: Tensor, valid_BG: Tensor) -> Tensor:
    """sum_k w_k (R_k - mean_k) / (std_k + 1e-6) of the group: GDPO, arXiv 2601.05242.

    Each reward function is normalised on its own, so that one with a small spread is not drowned by another. The paper
    whitens the sum over the batch afterwards (`advantage_norm: batch`). `parts_KBG`: scores of the K functions.
    """
    no_lengths = torch.zeros_like(valid_BG)
    normalised_KBG = torch.stack([grpo(part_BG, valid_BG, no_lengths) for part_BG in parts_KBG])
    return torch.einsum("k,kbg->bg", weights_K, normalised_KBG)


ADVANTAGES: dict[str, Advantage] = {
    rule.__name__: rule
    for rule in (grpo, dr_grpo, rloo, reinforce_pp_baseline, opo, opob, lite_ppo, maxrl, reinforce_pp)
}
"""Advantage functions by their names in the configuration."""


def _zero_invalid(values_BG: Tensor, valid_BG: Tensor) -> Tensor:
    """Replace invalid values, which may be NaN, by 0. A product with the mask would keep the NaN."""
    return torch.where(valid_BG, values_BG, torch.zeros_like(values_BG))


def _mean(values_BG: Tensor, valid_BG: Tensor) -> Tensor:
    """Mean of each row's valid values, [B, 1]."""
    return _zero_invalid(values_BG, valid_BG).sum(-1, keepdim=True) / valid_BG.sum(-1, keepdim=True).clamp(min=1)


def _std(values_BG: Tensor, valid_BG: Tensor) -> Tensor:
    """Unbiased standard deviation of each row's valid values, [B, 1]; 1 for rows with fewer than two."""
    count_B1 = valid_BG.sum(-1, keepdim=True)
    squares_B1 = _zero_invalid(values_BG - _mean(values_BG, valid_BG), valid_BG).square().sum(-1, keepdim=True)
    variance_B1 = squares_B1 / (count_B1 - 1).clamp(min=1)
    return torch.where(count_B1 > 1, variance_B1.sqrt(), torch.ones_like(variance_B1))


def _subtract_baseline(rewards_BG: Tensor, valid_BG: Tensor, baseline_B1: Tensor) -> Tensor:
    """R - baseline; a single valid sample keeps its reward, because its own mean would make it 0."""
    single_B1 = valid_BG.sum(-1, keepdim=True) <= 1
    baseline_B1 = torch.where(single_B1, torch.zeros_like(baseline_B1), baseline_B1)
    return _zero_invalid(rewards_BG - baseline_B1, valid_BG)


def normalise_over_batch(advantages_T: Tensor) -> Tensor:
    """(A - mean) / (std + 1e-5) over the T trained tokens of the batch, unbiased std: `adv_norm` of AReaL's recipes
    (arXiv 2505.24298), the last step of REINFORCE++ (arXiv 2501.03262) and of GDPO.

    >>> normalise_over_batch(torch.tensor([1.0, 1.0, -1.0, -1.0]))
    tensor([ 0.8660,  0.8660, -0.8660, -0.8660])
    """
    centred_T = advantages_T - advantages_T.mean()
    deviation = (centred_T.square().sum() / max(1, len(centred_T) - 1)).sqrt()
    return centred_T / (deviation + BATCH_EPS)
