"""The objective of a micro-batch: policy loss, corrections, KL divergence and entropy bonus.

    Tokens --loss--> loss_N --* multipliers of the corrections--> + beta * KL - coefficient * entropy --> loss_N
    loss of the batch = sum over micro-batches and ranks of sum(weight_N * loss_N)

This module does not depend on ranks or other micro-batches. Values from the whole batch arrive as arrays of `Tokens`:
advantages, weights, and the multiplier of the corrections (`correction_multiplier`) if one needs the whole batch.

The KL divergence from a reference policy, or from the policy that sampled (`kl_to`), is estimated on the sampled
tokens, with d = log pi - log pi_ref. Nothing is clamped: a clamp would remove the gradient of the tokens that have
diverged most. k3 grows like exp(-d), so above MAX_K3 it continues along its tangent: value and slope stay finite, and
the slope remains the derivative of the value.

As a loss, only k2 has the true gradient of the divergence, d * grad log pi (on policy). The gradient of k1 is zero in
expectation, and k3 has the gradient of the reversed divergence. `k3+` combines the value of k3 (never negative, low
variance) with the gradient of k2. `unbiased_k3` weights k3 with rho and differentiates both factors, so value and
gradient are unbiased also for tokens of older policies (DeepSeek-V3.2, arXiv 2512.02556).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from async_grpo.algorithms.custom import load_correction, load_loss
from async_grpo.algorithms.tokens import Tokens, log_ratio
from async_grpo.config.objective import ObjectiveConfig

MAX_K3 = 10.0
K3_KNEE = -2.610868638149876
"""The d < 0 at which k3 is MAX_K3."""
K3_SLOPE = -math.expm1(-K3_KNEE)
"""Slope of k3 there and beyond, -12.6."""
STEP_SCALE = "ess_lr"
"""The correction that scales the learning rate instead of multiplying tokens."""

Estimator = Callable[[Tensor], Tensor]
"""d [N] -> divergence [N]."""


def k1(d_N: Tensor) -> Tensor:
    """d: unbiased, high variance."""
    return d_N


def k2(d_N: Tensor) -> Tensor:
    """d^2 / 2: biased, with the true gradient. Schulman, "Approximating KL divergence", 2020."""
    return d_N.square() / 2


def k3(d_N: Tensor) -> Tensor:
    """exp(-d) - 1 + d, below K3_KNEE its tangent: never negative, and unbiased above. GRPO, arXiv 2402.03300."""
    near_N = d_N.clamp(min=K3_KNEE)  # exp would overflow otherwise
    return torch.expm1(-near_N) + near_N + K3_SLOPE * (d_N - near_N)


def k3_plus(d_N: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2."""
    k2_N = k2(d_N)
    return k3(d_N).detach() + k2_N - k2_N.detach()


ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3, "k3+": k3_plus}
"""KL estimators by their names in the configuration."""


UNBIASED_K3 = "unbiased_k3"
"""The estimator that also needs the importance weight of each token: see `policy_kl`."""


def token_kl(logprobs_N: Tensor, reference_N: Tensor, estimator: str) -> Tensor:
    """Divergence per token, [N]; the gradient goes through `logprobs_N`."""
    return ESTIMATORS[estimator](logprobs_N - reference_N.detach())


def policy_kl(tokens: Tokens, config: ObjectiveConfig) -> Tensor | None:
    """Divergence of pi_theta from the policy that `kl_to` names, per token [N]; None if that policy is not there."""
    is_to_behaviour = config.kl_to == "behaviour" and config.kl_beta > 0
    reference_N = tokens.behaviour_N if is_to_behaviour else tokens.reference_N
    if reference_N is None:
        return None
    if config.kl_estimator == UNBIASED_K3:
        rho_N = log_ratio(tokens.logprobs_N, tokens.behaviour_N).exp()
        return rho_N * token_kl(tokens.logprobs_N, reference_N, "k3")
    return token_kl(tokens.logprobs_N, reference_N, config.kl_estimator)


def penalise_rewards(rewards_M: Tensor, tokens: Tokens, reference_N: Tensor, *, beta: float, estimator: str) -> Tensor:
    """KL in the reward: R - beta * (sum over the sequence of the sampling policy's divergence), [M]."""
    divergence_N = token_kl(tokens.behaviour_N, reference_N, estimator).detach()
    return rewards_M - beta * tokens.sum(divergence_N)


def advantages_less_kl(
    advantages_N: Tensor, tokens: Tokens, reference_N: Tensor, *, beta: float, estimator: str
) -> Tensor:
    """A - beta * (sum of the divergence over this token and those after it), [N]: REINFORCE++, arXiv 2501.03262, whose
    reward of a token contains its divergence."""
    divergence_N = token_kl(tokens.behaviour_N, reference_N, estimator).detach()
    lengths = torch.bincount(tokens.segment_N, minlength=tokens.segments).tolist()
    following_sums = [part.flip(0).cumsum(0).flip(0) for part in divergence_N.split(lengths)]
    return advantages_N - beta * torch.cat(following_sums)


class Objective(NamedTuple):
    """Per-token results; only `loss_N` carries a gradient."""

    loss_N: Tensor
    clipped_N: Tensor
    """bool: outside the trust region."""
    rejected_N: Tensor
    """bool: the loss excludes the token, or a correction multiplies it by 0. It stays in the denominator."""


def token_objective(tokens: Tokens, config: ObjectiveConfig) -> Objective:
    """The loss of each trained token, to be minimised.

    Corrections multiply the policy loss only; KL and entropy cover all trained tokens. The KL term reads
    `tokens.reference_N`, the entropy bonus `tokens.entropy_N`. A correction that needs the whole batch requires
    `tokens.multiplier_N`, unless `tokens` is the whole batch.
    """
    policy_loss = load_loss(config.loss)(tokens, config)
    multiplier_N = tokens.multiplier_N
    if multiplier_N is None:
        multiplier_N = correction_multiplier(tokens, config)
    loss_N = multiplier_N * policy_loss.loss_N

    if config.kl_beta > 0 and config.kl_in == "loss":
        divergence_N = policy_kl(tokens, config)
        assert divergence_N is not None
        loss_N = loss_N + config.kl_beta * divergence_N
    if config.entropy_coef > 0:
        assert tokens.entropy_N is not None
        loss_N = loss_N - config.entropy_coef * tokens.entropy_N

    rejected_N = multiplier_N == 0
    if policy_loss.rejected_N is not None:
        rejected_N = rejected_N | policy_loss.rejected_N
    return Objective(loss_N, policy_loss.clipped_N, rejected_N)


def correction_multiplier(tokens: Tokens, config: ObjectiveConfig) -> Tensor:
    """Product of all corrections per token, constant, [N]."""
    constant = tokens.detached()
    multiplier_N = torch.ones_like(constant.log_rho_N)
    for correction in config.corrections:
        if correction.kind != STEP_SCALE:
            multiplier_N = multiplier_N * load_correction(correction.kind)(constant, correction)
    return multiplier_N
