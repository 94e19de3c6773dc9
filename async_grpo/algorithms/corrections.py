"""Off-policy corrections: a constant multiplier per token that an older policy or another engine has sampled.

    weight, token_tis, seq_tis, icepop    importance weight w = pi_prox / pi_behaviour, clamped or masked
    reject, seq_mis, geo_rs               1 or 0, by a divergence of rho = pi_theta / pi_behaviour
    m2po, opsm, kpop                      1 or 0, by rules of their own

Weights use w, because the ratio r of the loss covers the rest. Rejections use rho. With `prox: recompute` w and rho are
equal. Rejected tokens stay in every denominator, so rejection never makes the gradient of the other tokens larger.

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
LEAST_GAP = 1e-7
"""Smallest -log p that kpop distinguishes from p = 1, where log(1 - p) is -inf."""


def weight(tokens: Tokens, settings: CorrectionConfig) -> Tensor:
    """The importance weight, clamped to [low, high], or 0 outside it.

    Levels: `token` w of the token; `seq` the product of w over the sequence; `geo` their geometric mean.
    `token` with clamp is IMPALA's truncation (arXiv 1802.01561), with mask it is IcePop (arXiv 2510.18855).
    """
    if settings.level == "token":
        weight_N = tokens.log_w_N.exp()
    elif settings.level == "seq":
        weight_N = tokens.spread(_sequence_product(tokens, tokens.log_w_N))
    else:
        weight_N = tokens.spread(tokens.mean(tokens.log_w_N).exp())

    if settings.action == "clamp":
        return weight_N.clamp(min=settings.low, max=required(settings.upper))
    return weight_N * _is_within(weight_N, settings.low, settings.upper)


def reject(tokens: Tokens, settings: CorrectionConfig) -> Tensor:
    """0 for tokens or sequences whose divergence from the behaviour policy leaves the bounds: verl's `rollout_rs`.

    With d = log rho per token, `k1` compares rho with [low, high]; `k2` d^2 / 2 and `k3` rho - 1 - d must be at most
    `high`. Levels: `token`; `seq_sum`, `seq_mean` and `seq_max` over the sequence, in the logarithm for k1.
    """
    d_N = tokens.log_rho_N
    divergence_N = d_N
    if settings.estimator == "k2":
        divergence_N = d_N.square() / 2
    elif settings.estimator == "k3":
        divergence_N = torch.expm1(d_N) - d_N

    divergence = divergence_N
    if settings.level == "seq_sum":
        divergence = tokens.sum(divergence_N)
    elif settings.level == "seq_mean":
        divergence = tokens.mean(divergence_N)
    elif settings.level == "seq_max":
        divergence = tokens.max(divergence_N)

    if settings.estimator == "k1":
        divergence = clamp_log_ratio(divergence).exp()
    is_kept = _is_within(divergence, settings.low, settings.upper)
    return is_kept if settings.level == "token" else tokens.spread(is_kept)


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
    """Reject sequences with A < 0 whose mean of -log rho, an estimate of KL(behaviour | theta), is above `limit`:
    off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556."""
    diverged_N = tokens.spread(tokens.mean(-tokens.log_rho_N)) > required(settings.limit)
    return (~(diverged_N & (tokens.advantages_N < 0))).to(tokens.log_rho_N.dtype)


def kpop(tokens: Tokens, settings: CorrectionConfig) -> Tensor:
    """Reject tokens for which max(KL(p | q), KL(q | p)) is above `limit`, where p and q are the Bernoulli distributions
    "this token or another" under pi_theta and pi_behaviour: KPop of the Ring and AReaL teams.

    Unlike a bound on rho, it ignores large ratios of tiny probabilities.
    """
    log_p_N = tokens.logprobs_N.detach().double().clamp(max=-LEAST_GAP)
    log_q_N = tokens.behaviour_N.double().clamp(max=-LEAST_GAP)
    forward_N = _bernoulli_kl(log_p_N, log_q_N)
    backward_N = _bernoulli_kl(log_q_N, log_p_N)
    return (torch.maximum(forward_N, backward_N) <= required(settings.limit)).to(tokens.log_rho_N.dtype)


CORRECTIONS: dict[str, Correction] = {
    "weight": weight,
    "token_tis": weight,
    "seq_tis": weight,
    "icepop": weight,
    "reject": reject,
    "seq_mis": reject,
    "geo_rs": reject,
    "m2po": m2po,
    "opsm": opsm,
    "kpop": kpop,
}
"""Corrections by their names in the configuration. The names without a function of their own are settings of `weight`
and `reject` (`config.presets`)."""


def sequence_weights(tokens: Tokens) -> Tensor:
    """Importance weight of each sequence, the product of rho over its tokens; float64 [M]."""
    return _sequence_product(tokens, tokens.log_rho_N).double()


def ess_sums(tokens: Tokens) -> Tensor:
    """(sum of w, sum of w^2, count) over the sequences, w = product of rho; float64 [3].

    Sum them over micro-batches and ranks, then call `ess_scale`.
    """
    has_tokens_M = tokens.sum(torch.ones_like(tokens.log_rho_N)) > 0
    weight_M = sequence_weights(tokens) * has_tokens_M
    return torch.stack([weight_M.sum(), weight_M.square().sum(), has_tokens_M.sum().double()])


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


def _sequence_product(tokens: Tokens, log_ratio_N: Tensor) -> Tensor:
    """Product of the ratios over each sequence, [M]."""
    return clamp_log_ratio(tokens.sum(log_ratio_N)).exp()


def _is_within(values: Tensor, low: float | None, high: float | None) -> Tensor:
    """1 inside [low, high], 0 outside and for NaN."""
    is_inside = values <= required(high)
    if low is not None:
        is_inside = is_inside & (values >= low)
    return is_inside.to(values.dtype)


def _bernoulli_kl(log_p_N: Tensor, log_q_N: Tensor) -> Tensor:
    """KL(Bernoulli(p) | Bernoulli(q)) from log p < 0 and log q < 0."""
    log_not_p_N = torch.log(-torch.expm1(log_p_N))
    log_not_q_N = torch.log(-torch.expm1(log_q_N))
    return log_p_N.exp() * (log_p_N - log_q_N) - torch.expm1(log_p_N) * (log_not_p_N - log_not_q_N)
