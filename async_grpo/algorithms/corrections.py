"""Off-policy corrections: a constant multiplier per token that an older policy or another engine has sampled.

    reweight  token_tis, seq_tis, icepop     w = pi_prox / pi_behaviour: the loss's ratio r covers the rest
    reject    seq_mis, geo_rs, m2po, opsm    rho = pi_theta / pi_behaviour: the multiplier is 0 or 1

With `prox: recompute` w and rho are equal. Rejected tokens stay in every denominator, so rejection never makes the
gradient of the other tokens larger.

All corrections except `m2po` use one sequence at a time, so results do not depend on micro-batches and ranks. `m2po`
needs the tokens of the whole batch: the trainer makes a forward pass over it first, and all ranks compute the same
mask. `ess_lr` is not a multiplier: it scales the learning rate by three sums over micro-batches and ranks.

PROXIMALS lists the sources of pi_prox, the policy at the centre of the trust region. It carries no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from async_grpo.algorithms.tokens import Tokens, clamp_log_ratio, required
from async_grpo.config.objective import CorrectionConfig

Correction = Callable[[Tokens, CorrectionConfig], Tensor]
"""(tokens without gradient, settings) -> multiplier [N], >= 0. Also the signature of a custom function."""
Proximal = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logprobs_N, behaviour_N, age_N) -> log pi_prox [N]; age: trainer version - version that sampled the token."""


def token_tis(tokens: Tokens, settings: CorrectionConfig) -> Tensor:
    """min(w, cap): truncated importance sampling per token, as in arXiv 1802.01561 (IMPALA)."""
    return tokens.log_w_N.exp().clamp(max=required(settings.cap))


def seq_tis(tokens: Tokens, settings: CorrectionConfig) -> Tensor:
    """min(product of w over the sequence, cap), for each token of the sequence."""
    return tokens.spread(_product(tokens, tokens.log_w_N).clamp(max=required(settings.cap)))


def icepop(tokens: Tokens, settings: CorrectionConfig) -> Tensor:
    """w, but 0 outside [low, high]: IcePop, arXiv 2510.18855."""
    weight_N = tokens.log_w_N.exp()
    return weight_N * _within(weight_N, settings)


def seq_mis(tokens: Tokens, settings: CorrectionConfig) -> Tensor:
    """Reject sequences whose product of rho is outside [low, high]: masked importance sampling per sequence."""
    return tokens.spread(_within(_product(tokens, tokens.log_rho_N), settings))


def geo_rs(tokens: Tokens, settings: CorrectionConfig) -> Tensor:
    """Reject sequences whose exp(mean of log rho) is outside [low, high]: independent of their length."""
    return tokens.spread(_within(tokens.mean(tokens.log_rho_N).exp(), settings))


def m2po(tokens: Tokens, settings: CorrectionConfig) -> Tensor:
    """Reject the tokens of the batch with the largest (log rho)^2 until the mean of the others is below `limit`: M2PO,
    arXiv 2510.01161. Tokens with equal values are rejected together, so the order of the tokens does not matter."""
    squares_N = tokens.log_rho_N.double().square()
    sorted_N = squares_N.sort().values
    means_N = sorted_N.cumsum(0) / torch.arange(1, len(sorted_N) + 1, dtype=torch.float64, device=sorted_N.device)

    # The running means of sorted values only rise: the first one at the limit marks the smallest value to reject.
    rejected_N = sorted_N[means_N >= required(settings.limit)]
    if len(rejected_N) == 0:
        return torch.ones_like(tokens.log_rho_N)
    return (squares_N < rejected_N[0]).to(tokens.log_rho_N.dtype)


def opsm(tokens: Tokens, settings: CorrectionConfig) -> Tensor:
    """Reject sequences with A < 0 and mean of -log rho, an estimate of KL(behaviour | theta), above `limit`: off-policy
    sequence masking, DeepSeek-V3.2, arXiv 2512.02556."""
    diverged_N = tokens.spread(tokens.mean(-tokens.log_rho_N)) > required(settings.limit)
    return (~(diverged_N & (tokens.advantages_N < 0))).to(tokens.log_rho_N.dtype)


CORRECTIONS: dict[str, Correction] = {
    rule.__name__: rule for rule in (token_tis, seq_tis, icepop, seq_mis, geo_rs, m2po, opsm)
}
"""Corrections by their names in the configuration."""


def sequence_weights(tokens: Tokens) -> Tensor:
    """Importance weight of each sequence, the product of rho over its tokens; float64 [M]."""
    return _product(tokens, tokens.log_rho_N).double()


def ess_sums(tokens: Tokens) -> Tensor:
    """(sum of w, sum of w^2, count) over the sequences, w = product of rho; float64 [3].

    Sum them over micro-batches and ranks, then call `ess_scale`.
    """
    present_M = tokens.sum(torch.ones_like(tokens.log_rho_N)) > 0
    weight_M = sequence_weights(tokens) * present_M
    return torch.stack([weight_M.sum(), weight_M.square().sum(), present_M.sum().double()])


def ess_scale(weights: float, squares: float, sequences: float) -> float:
    """sqrt(ESS / B), ESS = (sum w)^2 / sum w^2 over the B sequences of the batch: VCPO, arXiv 2602.17616.

    In (0, 1]; 1 for a batch without trained tokens. It scales the learning rate, because Adam would normalise a scaled
    gradient again.
    """
    if squares == 0 or sequences == 0:
        return 1.0
    return math.sqrt(weights**2 / (squares * sequences))


def recompute(logprobs_N: Tensor, behaviour_N: Tensor, age_N: Tensor) -> Tensor:
    """The policy just before the step: decoupled PPO, AReaL, arXiv 2505.24298.

    With one update per step, the forward pass of the step already evaluates these weights: the same numbers as a
    separate pass, without its cost (a quarter of the step). r is then 1, and only w corrects for the age of the tokens.
    With several updates, the trainer makes the separate pass and uses its numbers instead of this function.
    """
    return logprobs_N.detach()


def loglinear(logprobs_N: Tensor, behaviour_N: Tensor, age_N: Tensor) -> Tensor:
    """log pi_b + alpha (log pi_theta - log pi_b), alpha = (v_prox - v_b) / (v_theta - v_b): A-3PO, arXiv 2512.06547.

    v_prox = v_theta - 1, one step behind the current policy, so alpha = 1 - 1 / age: tokens of the previous version
    have pi_prox = pi_b (plain PPO), older ones approach pi_theta. At age 0 pi_prox is pi_theta itself. With several
    updates per step, v_theta is the unfinished version and all ages are one higher: pi_prox is the policy before it.
    """
    age_N = age_N.to(logprobs_N.dtype)
    alpha_N = torch.where(age_N >= 1, 1.0 - 1.0 / age_N.clamp(min=1), torch.ones_like(age_N))
    return behaviour_N + alpha_N * (logprobs_N.detach() - behaviour_N)


def behaviour(logprobs_N: Tensor, behaviour_N: Tensor, age_N: Tensor) -> Tensor:
    """The policy that sampled the token: plain PPO, arXiv 1707.06347. r then equals rho, and w is 1."""
    return behaviour_N


PROXIMALS: dict[str, Proximal] = {"recompute": recompute, "loglinear": loglinear, "behaviour": behaviour}
"""Sources of pi_prox by their names in the configuration."""


def _product(tokens: Tokens, log_ratio_N: Tensor) -> Tensor:
    """Product of the ratios over each sequence, [M]."""
    return clamp_log_ratio(tokens.sum(log_ratio_N)).exp()


def _within(ratio: Tensor, settings: CorrectionConfig) -> Tensor:
    """1 inside [low, high]; 0 outside and for NaN."""
    return ((ratio >= required(settings.low)) & (ratio <= required(settings.high))).to(ratio.dtype)
