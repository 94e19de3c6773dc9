"""The KL divergence from a reference policy, estimated on the sampled tokens: d = log pi - log pi_ref.

Nothing is clamped: a clamp would take the gradient from the tokens that have moved furthest. k3 grows like exp(-d), so
beyond MAX_K3 it goes on along its tangent: value and slope stay finite, and the slope that of the value.

As a loss only k2 has the true gradient of the divergence, d * grad log pi (on policy); k1 has none in expectation, and
k3 that of the reversed divergence. `k3+` has the value of k3, which is never negative and of low variance, and the
gradient of k2.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from async_grpo.algorithms.tokens import Tokens

MAX_K3 = 10.0
K3_KNEE = -2.610868638149876
"""The d < 0 at which k3 is MAX_K3."""
K3_SLOPE = -math.expm1(-K3_KNEE)
"""Of k3 there and beyond, -12.6."""

Estimator = Callable[[Tensor], Tensor]
"""d [N] -> divergence [N]."""


def k1(d_N: Tensor) -> Tensor:
    """d: unbiased, of high variance."""
    return d_N


def k2(d_N: Tensor) -> Tensor:
    """d^2 / 2: biased, with the true gradient. Schulman, "Approximating KL divergence", 2020."""
    return d_N.square() / 2


def k3(d_N: Tensor) -> Tensor:
    """exp(-d) - 1 + d, below K3_KNEE its tangent: never negative, and unbiased above. GRPO, arXiv 2402.03300."""
    near_N = d_N.clamp(min=K3_KNEE)  # so that no branch overflows
    return torch.expm1(-near_N) + near_N + K3_SLOPE * (d_N - near_N)


def k3_plus(d_N: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2."""
    straight_N = k2(d_N)
    return k3(d_N).detach() + straight_N - straight_N.detach()


ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3, "k3+": k3_plus}
"""Estimator by its name in the configuration."""


def token_kl(logprobs_N: Tensor, reference_N: Tensor, estimator: str) -> Tensor:
    """Divergence at each token; the gradient goes through `logprobs_N`."""
    return ESTIMATORS[estimator](logprobs_N - reference_N.detach())


def rewards_less_kl(rewards_M: Tensor, tokens: Tokens, reference_N: Tensor, *, beta: float, estimator: str) -> Tensor:
    """R - beta * (sum of the divergence over the sequence), of the policy that sampled it: KL in the reward, [M]."""
    divergence_N = token_kl(tokens.behaviour_N, reference_N, estimator).detach()
    return rewards_M - beta * tokens.sum(divergence_N)
