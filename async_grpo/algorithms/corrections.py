"""Corrections for tokens that another policy or another engine sampled: a constant multiplier for each token.

Those that reweight (token_tis, seq_tis, icepop) take w = pi_prox / pi_behaviour, the part of the way from the samples
that the loss's own r does not cover. Those that reject (0 or 1) take rho = pi_theta / pi_behaviour, the whole way. With
`prox: recompute` both are the same numbers. Rejected tokens stay in every denominator; see `aggregation`.

All but `m2po` look at one sequence at a time, so micro-batches and ranks change nothing. `m2po` must be given the
tokens of the whole batch: the trainer makes a forward pass over it first, and every rank computes the same mask.
`ess_lr` is not a multiplier: it adds up three sums over micro-batches and ranks, and scales the learning rate.

PROXIMALS says where pi_prox comes from, the policy at the centre of the trust region. It carries no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from async_grpo.algorithms.tokens import Tokens, bounded, required
from async_grpo.config.objective import CorrectionConfig

Correction = Callable[[Tokens, CorrectionConfig], Tensor]
"""(tokens without gradient, its dials) -> multiplier [N], >= 0. Also the signature of a user's own."""
Proximal = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logprobs_N, behaviour_N, age_N) -> log pi_prox [N]; age: trainer version - version that sampled the token."""


def token_tis(tokens: Tokens, dials: CorrectionConfig) -> Tensor:
    """min(w, cap): truncated importance sampling a token, as in arXiv 1802.01561 (IMPALA)."""
    return tokens.log_w_N.exp().clamp(max=required(dials.cap))


def seq_tis(tokens: Tokens, dials: CorrectionConfig) -> Tensor:
    """min(product of w over the sequence, cap), at each of its tokens."""
    return tokens.spread(_product(tokens, tokens.log_w_N).clamp(max=required(dials.cap)))


def icepop(tokens: Tokens, dials: CorrectionConfig) -> Tensor:
    """w, but 0 outside [low, high]: IcePop, arXiv 2510.18855."""
    weight_N = tokens.log_w_N.exp()
    return weight_N * _within(weight_N, dials)


def seq_mis(tokens: Tokens, dials: CorrectionConfig) -> Tensor:
    """Reject sequences whose product of rho is outside [low, high]: masked importance sampling a sequence."""
    return tokens.spread(_within(_product(tokens, tokens.log_rho_N), dials))


def geo_rs(tokens: Tokens, dials: CorrectionConfig) -> Tensor:
    """Reject sequences whose exp(mean of log rho) is outside [low, high]: their length has no part in it."""
    return tokens.spread(_within(tokens.mean(tokens.log_rho_N).exp(), dials))


def m2po(tokens: Tokens, dials: CorrectionConfig) -> Tensor:
    """Reject the tokens of the batch with the largest (log rho)^2 until the mean of the others is below `limit`: M2PO,
    arXiv 2510.01161. Tokens of equal value go together, so the order of the tokens does not matter."""
    squares_N = tokens.log_rho_N.double().square()
    sorted_N = squares_N.sort().values
    means_N = sorted_N.cumsum(0) / torch.arange(1, len(sorted_N) + 1, dtype=torch.float64, device=sorted_N.device)
    above_N = sorted_N[means_N >= required(dials.limit)]  # the means rise: one token too many, and all larger ones
    if len(above_N) == 0:
        return torch.ones_like(tokens.log_rho_N)
    return (squares_N < above_N[0]).to(tokens.log_rho_N.dtype)


def opsm(tokens: Tokens, dials: CorrectionConfig) -> Tensor:
    """Reject sequences with A < 0 and mean of -log rho, an estimate of KL(behaviour | theta), above `limit`: off-policy
    sequence masking, DeepSeek-V3.2, arXiv 2512.02556."""
    strayed_N = tokens.spread(tokens.mean(-tokens.log_rho_N)) > required(dials.limit)
    return (~(strayed_N & (tokens.advantages_N < 0))).to(tokens.log_rho_N.dtype)


CORRECTIONS: dict[str, Correction] = {
    rule.__name__: rule for rule in (token_tis, seq_tis, icepop, seq_mis, geo_rs, m2po, opsm)
}
"""Multiplier by its name in the configuration."""


def sequence_weights(tokens: Tokens) -> Tensor:
    """The importance weight of each sequence, the product of rho; float64 [M]."""
    return _product(tokens, tokens.log_rho_N).double()


def ess_sums(tokens: Tokens) -> Tensor:
    """(sum of w, sum of w^2, count) over the sequences, w = product of rho; float64 [3].

    Add them up over micro-batches and ranks, then call `ess_scale`.
    """
    present_M = tokens.sum(torch.ones_like(tokens.log_rho_N)) > 0
    weight_M = sequence_weights(tokens) * present_M
    return torch.stack([weight_M.sum(), weight_M.square().sum(), present_M.sum().double()])


def ess_scale(weights: float, squares: float, sequences: float) -> float:
    """sqrt(ESS / B), ESS = (sum w)^2 / sum w^2 over the B sequences of the batch: VCPO, arXiv 2602.17616.

    In (0, 1]; 1 for a batch on which nothing is trained. It scales the learning rate, because Adam would undo a scaled
    gradient.
    """
    return math.sqrt(weights**2 / (squares * sequences)) if squares and sequences else 1.0


def recompute(logprobs_N: Tensor, behaviour_N: Tensor, age_N: Tensor) -> Tensor:
    """The policy just before the step: decoupled PPO, AReaL, arXiv 2505.24298.

    With one update a step these are the weights that the forward pass of the step itself evaluates: the same numbers
    as a pass of their own would give, without its cost (a quarter of the step). r is then 1 and only w corrects for the
    age of the tokens. With several updates the trainer makes that pass and uses its numbers in place of this function.
    """
    return logprobs_N.detach()


def loglinear(logprobs_N: Tensor, behaviour_N: Tensor, age_N: Tensor) -> Tensor:
    """log pi_b + alpha (log pi_theta - log pi_b), alpha = (v_prox - v_b) / (v_theta - v_b): A-3PO, arXiv 2512.06547.

    v_prox = v_theta - 1, one step behind the present policy, so alpha = 1 - 1 / age: tokens of the last version
    have pi_prox = pi_b (plain PPO), older ones approach pi_theta. At age 0 pi_prox is pi_theta itself. With several
    updates a step v_theta is the version in the making, and all ages are one more: pi_prox is the policy before it.
    """
    age_N = age_N.to(logprobs_N.dtype)
    alpha_N = torch.where(age_N >= 1, 1.0 - 1.0 / age_N.clamp(min=1), torch.ones_like(age_N))
    return behaviour_N + alpha_N * (logprobs_N.detach() - behaviour_N)


def behaviour(logprobs_N: Tensor, behaviour_N: Tensor, age_N: Tensor) -> Tensor:
    """The policy that sampled the token: plain PPO, arXiv 1707.06347. r is then the whole ratio rho, and w is 1."""
    return behaviour_N


PROXIMALS: dict[str, Proximal] = {"recompute": recompute, "loglinear": loglinear, "behaviour": behaviour}
"""Source of pi_prox by its name in the configuration."""


def _product(tokens: Tokens, log_ratio_N: Tensor) -> Tensor:
    return bounded(tokens.sum(log_ratio_N)).exp()


def _within(ratio: Tensor, dials: CorrectionConfig) -> Tensor:
    """1 inside [low, high], 0 outside and for NaN."""
    return ((ratio >= required(dials.low)) & (ratio <= required(dials.high))).to(ratio.dtype)
