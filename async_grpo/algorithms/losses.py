"""Policy losses, one number a trained token (N of them), to be minimised.

Notation: r = pi_theta / pi_prox, w = pi_prox / pi_behaviour, A = advantage. `logprobs_N` carries
the gradient; everything else is constant.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20, so that exp never overflows."""


class TokenLoss(NamedTuple):
    """Per-token results; only `loss_N` carries a gradient."""

    loss_N: Tensor
    clipped_N: Tensor
    """bool: the clip was active, so the token has no gradient."""


def ppo_clip(
    logprobs_N: Tensor, prox_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float
) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): PPO, arXiv 1707.06347; asymmetric as in DAPO."""
    ratio_N = _ratio(logprobs_N, prox_N)
    unclipped_N = -ratio_N * advantages_N
    clipped_N = -ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_N
    return TokenLoss(torch.maximum(unclipped_N, clipped_N), clipped_N.detach() > unclipped_N.detach())


def decoupled(
    logprobs_N: Tensor,
    prox_N: Tensor,
    behaviour_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    behaviour_cap: float,
) -> TokenLoss:
    """min(w, cap) * ppo_clip(r), w constant: decoupled PPO of AReaL, arXiv 2505.24298.

    The trust region is around the policy just before the step (prox), and w corrects for the
    older policy that sampled the token.
    """
    token = ppo_clip(logprobs_N, prox_N, advantages_N, clip_low=clip_low, clip_high=clip_high)
    weight_N = importance_weight(prox_N, behaviour_N).clamp(max=behaviour_cap)
    return token._replace(loss_N=weight_N * token.loss_N)


def importance_weight(logprobs_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """pi / pi_behaviour without gradient, before any cap."""
    return _ratio(logprobs_N.detach(), behaviour_N)


def _ratio(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    return (logprobs_N - reference_N.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
