"""The objective of a micro-batch, put together from its rows.

    Tokens --loss--> loss_N --* multipliers of the corrections--> + beta * KL - coefficient * entropy --> loss_N
    loss of the batch = sum over micro-batches and ranks of sum(weight_N * loss_N)

Nothing here needs to know of ranks or of other micro-batches. What depends on the whole batch comes in from outside:
advantages, weights, and the multiplier of corrections that must see all of it (`whole_batch_multiplier`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from async_grpo.algorithms.kl import token_kl
from async_grpo.algorithms.own import correction_of, loss_of
from async_grpo.algorithms.tokens import Tokens
from async_grpo.config.objective import CorrectionConfig, ObjectiveConfig

STEP_SCALE = "ess_lr"
"""The correction that scales the learning rate: no multiplier."""


class Objective(NamedTuple):
    """Per-token results; only `loss_N` carries a gradient."""

    loss_N: Tensor
    clipped_N: Tensor
    """bool: outside of the trust region."""
    rejected_N: Tensor
    """bool: the loss leaves this token out, or a correction multiplies it by 0. It stays in the denominator."""


def token_objective(tokens: Tokens, config: ObjectiveConfig, given_N: Tensor | None = None) -> Objective:
    """What is minimised, a token. `given_N`: this micro-batch's part of `whole_batch_multiplier`.

    Corrections act on the policy loss; KL and entropy are of all trained tokens. They need `tokens.reference_N` and
    `tokens.entropy_N`.
    """
    token = loss_of(config.loss)(tokens, config)
    local = [correction for correction in config.corrections if not correction.needs_whole_batch]
    multiplier_N = _product(tokens, local)
    if given_N is not None:
        multiplier_N = multiplier_N * given_N
    loss_N = multiplier_N * token.loss_N
    if config.kl_beta > 0 and config.kl_in == "loss":
        assert tokens.reference_N is not None
        loss_N = loss_N + config.kl_beta * token_kl(tokens.logprobs_N, tokens.reference_N, config.kl_estimator)
    if config.entropy_coef > 0:
        assert tokens.entropy_N is not None
        loss_N = loss_N - config.entropy_coef * tokens.entropy_N
    rejected_N = multiplier_N == 0
    return Objective(loss_N, token.clipped_N, rejected_N if token.rejected_N is None else rejected_N | token.rejected_N)


def whole_batch_multiplier(tokens: Tokens, config: ObjectiveConfig) -> Tensor:
    """Of the corrections that look at the whole batch; `tokens` are all of its trained tokens, in any order."""
    return _product(tokens, [correction for correction in config.corrections if correction.needs_whole_batch])


def every_multiplier(tokens: Tokens, config: ObjectiveConfig) -> Tensor:
    """Of all corrections. Where a batch is trained in several updates they are taken once, before the first."""
    return _product(tokens, config.corrections)


def _product(tokens: Tokens, corrections: Iterable[CorrectionConfig]) -> Tensor:
    constant = tokens.detached()
    multiplier_N = torch.ones_like(constant.log_rho_N)
    for correction in corrections:
        if correction.kind != STEP_SCALE:
            multiplier_N = multiplier_N * correction_of(correction.kind)(constant, correction)
    return multiplier_N
