"""Where pi_prox comes from, the policy that the trust region is around. Constant: it carries no gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Proximal = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logprobs_N, behaviour_N, age_N) -> log pi_prox [N]; age: trainer version - version that sampled the token."""


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
"""Choice by its name in the configuration."""
