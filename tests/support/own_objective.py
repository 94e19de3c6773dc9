"""Functions such as a user would write, right ones and wrong ones."""

from __future__ import annotations

import torch
from torch import Tensor

from async_grpo.algorithms import TokenLoss, Tokens
from async_grpo.config.objective import CorrectionConfig, ObjectiveConfig


def signs(rewards_BG: Tensor, valid_BG: Tensor, lengths_BG: Tensor) -> Tensor:
    """+1 above a half, -1 below."""
    return torch.where(valid_BG, torch.where(rewards_BG > 0.5, 1.0, -1.0), 0.0).double()


def squared(tokens: Tokens, config: ObjectiveConfig) -> TokenLoss:
    """A log r + scale * (log r)^2."""
    log_r_N = tokens.log_r_N
    loss_N = -tokens.advantages_N * log_r_N + float(config.options.get("scale", 1.0)) * log_r_N.square()
    return TokenLoss(loss_N, torch.zeros_like(loss_N, dtype=torch.bool))


def endless(tokens: Tokens, config: ObjectiveConfig) -> TokenLoss:
    """Always 0, with a gradient that is not a number."""
    loss_N = (tokens.logprobs_N - tokens.logprobs_N.detach()).abs().sqrt()
    return TokenLoss(loss_N, torch.zeros_like(loss_N, dtype=torch.bool))


def halves(tokens: Tokens, correction: CorrectionConfig) -> Tensor:
    """A half everywhere."""
    return torch.full_like(tokens.logprobs_N, 0.5)


def forgets_the_gradient(tokens: Tokens, config: ObjectiveConfig) -> TokenLoss:
    token = squared(tokens, config)
    return token._replace(loss_N=token.loss_N.detach())


def gives_a_bare_tensor(tokens: Tokens, config: ObjectiveConfig) -> Tensor:
    return squared(tokens, config).loss_N


def gives_one_number(tokens: Tokens, correction: CorrectionConfig) -> Tensor:
    return torch.ones(())


def gives_nan(rewards_BG: Tensor, valid_BG: Tensor, lengths_BG: Tensor) -> Tensor:
    return rewards_BG


def takes_nothing() -> None:
    return None


not_a_function = 3
