"""Policy losses to be minimised, one number per trained token (N tokens).

r = pi_theta / pi_prox, w = pi_prox / pi_behaviour, rho = pi_theta / pi_behaviour, A = advantage, sg = stop gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from async_grpo.algorithms.tokens import Tokens, clamp_log_ratio, required
from async_grpo.config.objective import ObjectiveConfig


class TokenLoss(NamedTuple):
    """Per-token results; only `loss_N` carries a gradient."""

    loss_N: Tensor
    clipped_N: Tensor
    """bool: outside the trust region, so the token (or its sequence) has no gradient, or a capped one."""
    rejected_N: Tensor | None = None
    """bool: tokens that the loss excludes, as a rejecting correction does. None: no token is excluded."""


Loss = Callable[[Tokens, ObjectiveConfig], TokenLoss]
"""(tokens, config) -> TokenLoss. Also the signature of a custom loss; `config.options` holds its settings."""


def ppo_clip(tokens: Tokens, config: ObjectiveConfig) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): PPO, arXiv 1707.06347; clip-higher as in DAPO, arXiv
    2503.14476. With dual_clip c, at most c |A| where A < 0, arXiv 1912.09729."""
    return _clip(tokens.log_r_N.exp(), tokens.advantages_N, config)


def decoupled(tokens: Tokens, config: ObjectiveConfig) -> TokenLoss:
    """w * ppo_clip(r), w constant: decoupled PPO of AReaL, arXiv 2505.24298.

    The trust region is centred on the policy just before the step (prox), and w corrects for the older policy that
    sampled the token. Where w > behaviour_cap, `behaviour_cap_mode` decides: mask (the token is excluded, as in
    AReaL's configurations) or clamp (w = behaviour_cap).
    """
    clipped = ppo_clip(tokens, config)
    cap = required(config.behaviour_cap)
    weight_N = tokens.log_w_N.exp()
    if config.behaviour_cap_mode == "clamp":
        return clipped._replace(loss_N=weight_N.clamp(max=cap) * clipped.loss_N)

    above_N = weight_N > cap
    return clipped._replace(loss_N=weight_N.masked_fill(above_N, 0.0) * clipped.loss_N, rejected_N=above_N)


def gspo(tokens: Tokens, config: ObjectiveConfig) -> TokenLoss:
    """ppo_clip with the ratio of the sequence, s = exp(mean of log r), for each of its tokens: GSPO, arXiv 2507.18071.

    The mean over the tokens of a sequence is then min(s A, clip(s) A).
    """
    ratio_M = tokens.mean(tokens.log_r_N).exp()
    return _clip(tokens.spread(ratio_M), tokens.advantages_N, config)


def cispo(tokens: Tokens, config: ObjectiveConfig) -> TokenLoss:
    """-sg(clip(r)) A log pi: CISPO, MiniMax-M1, arXiv 2506.13585. No token loses its gradient.

    r is at most 1 + clip_high and, only if clip_low is set, at least 1 - clip_low; the paper sets no lower bound.
    """
    ratio_N = tokens.log_r_N.detach().exp()
    low = None if config.clip_low is None else 1.0 - config.clip_low
    weight_N = ratio_N.clamp(low, 1.0 + required(config.clip_high))
    return TokenLoss(-weight_N * tokens.advantages_N * tokens.logprobs_N, weight_N != ratio_N)


def sapo(tokens: Tokens, config: ObjectiveConfig) -> TokenLoss:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A: SAPO, arXiv 2511.20347. A soft gate
    instead of a clip; its slope at r = 1 is 1."""
    positive = required(config.sapo_tau_positive)
    negative = required(config.sapo_tau_negative)
    tau_N = torch.where(tokens.advantages_N >= 0, positive, negative).to(tokens.advantages_N.dtype)
    gate_N = torch.sigmoid(tau_N * (tokens.log_r_N.exp() - 1.0)) * 4.0 / tau_N
    return TokenLoss(-gate_N * tokens.advantages_N, torch.zeros_like(tau_N, dtype=torch.bool))


def gmpo(tokens: Tokens, config: ObjectiveConfig) -> TokenLoss:
    """-A exp(mean of clip(log r)) for each token of the sequence: GMPO, arXiv 2507.20673.

    log r is clamped to at most clip_high where A >= 0 and to at least -clip_low where A < 0: PPO's min, per token.
    """
    log_r_N = tokens.log_r_N
    advantages_N = tokens.advantages_N
    low, high = required(config.clip_low), required(config.clip_high)
    clipped_N = torch.where(advantages_N >= 0, log_r_N.clamp(max=high), log_r_N.clamp(min=-low))
    ratio_M = tokens.mean(clipped_N).exp()
    return TokenLoss(-tokens.spread(ratio_M) * advantages_N, clipped_N.detach() != log_r_N.detach())


def dppo_tv(tokens: Tokens, config: ObjectiveConfig) -> TokenLoss:
    """-A sg(min(rho, behaviour_cap)) log pi, but 0 where A > 0 and pi - mu > clip_high, or A <= 0 and pi - mu <
    -clip_low (mu = pi_behaviour): DPPO with binary total variation, arXiv 2602.04879."""
    difference_N = tokens.logprobs_N.detach().exp() - tokens.behaviour_N.exp()
    low, high = required(config.clip_low), required(config.clip_high)
    outside_N = torch.where(tokens.advantages_N > 0, difference_N > high, difference_N < -low)
    weight_N = tokens.log_rho_N.exp().clamp(max=required(config.behaviour_cap)) * ~outside_N
    return TokenLoss(-weight_N * tokens.advantages_N * tokens.logprobs_N, outside_N)


def topr(tokens: Tokens, config: ObjectiveConfig) -> TokenLoss:
    """-sg(c) A log pi, c = 1 where A >= 0, clip(product of rho over the sequence, 0, 1) where A < 0: tapered
    off-policy REINFORCE, arXiv 2503.14286."""
    product_N = tokens.spread(clamp_log_ratio(tokens.sum(tokens.log_rho_N)).exp())
    negative_N = tokens.advantages_N < 0
    weight_N = torch.where(negative_N, product_N.clamp(max=1.0), torch.ones_like(product_N))
    return TokenLoss(-weight_N * tokens.advantages_N * tokens.logprobs_N, negative_N & (product_N > 1.0))


LOSSES: dict[str, Loss] = {
    rule.__name__: rule for rule in (ppo_clip, decoupled, gspo, cispo, sapo, gmpo, dppo_tv, topr)
}
"""Losses by their names in the configuration."""


def _clip(ratio_N: Tensor, advantages_N: Tensor, config: ObjectiveConfig) -> TokenLoss:
    """-min(ratio A, clip(ratio) A), with the dual clip if it is configured."""
    plain_N = -ratio_N * advantages_N
    bounded_N = -ratio_N.clamp(1.0 - required(config.clip_low), 1.0 + required(config.clip_high)) * advantages_N
    clipped = TokenLoss(torch.maximum(plain_N, bounded_N), bounded_N.detach() > plain_N.detach())
    if config.dual_clip is None:
        return clipped
    return _dual_clip(clipped, advantages_N, config.dual_clip)


def _dual_clip(clipped: TokenLoss, advantages_N: Tensor, factor: float) -> TokenLoss:
    """Limit the loss to factor * |A| where A < 0: PPO's min leaves it unbounded there for large ratios."""
    above_N = (advantages_N < 0) & (clipped.loss_N.detach() > -factor * advantages_N)
    return TokenLoss(torch.where(above_N, -factor * advantages_N, clipped.loss_N), clipped.clipped_N | above_N)
