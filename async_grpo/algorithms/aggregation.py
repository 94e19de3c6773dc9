"""How the losses of tokens become the loss of a batch: one weight for all tokens of a sequence.

    loss = sum over sequences i of weight_i * (sum of the losses of its trained tokens)

The weights come from the whole batch and are known before the step. The sum is linear, so its value and gradient
do not depend on how sequences fall into micro-batches and ranks. They are computed before anything is rejected:
a rejected token adds 0 to the sum and stays in the denominator, so that rejecting some tokens never makes the
gradient of the others larger.

Shapes: tokens_N, tokens of each of the N sequences of the batch (0: no verifier could judge it). `longest` is the
most tokens that a completion may have, a constant of the run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Aggregation = Callable[[Tensor, int], Tensor]
"""(tokens_N, longest) -> weight of each token of each sequence, float64 [N]."""


def token_mean(tokens_N: Tensor, longest: int) -> Tensor:
    """1 / (tokens of the batch): every token counts the same. DAPO, arXiv 2503.14476."""
    return _where_trained(tokens_N, 1.0 / tokens_N.sum().clamp(min=1).double())


def seq_mean_token_mean(tokens_N: Tensor, longest: int) -> Tensor:
    """1 / (sequences * own tokens): every sequence counts the same. GRPO, arXiv 2402.03300."""
    return _where_trained(tokens_N, 1.0 / (_sequences(tokens_N) * tokens_N.clamp(min=1)))


def seq_mean_token_sum_norm(tokens_N: Tensor, longest: int) -> Tensor:
    """1 / (sequences * longest): the divisor is a constant, so length has no part in it. Dr. GRPO, arXiv 2503.20783."""
    return _where_trained(tokens_N, 1.0 / (_sequences(tokens_N) * longest))


def token_sum(tokens_N: Tensor, longest: int) -> Tensor:
    """1: the plain sum over tokens. It grows with the batch, and so should the learning rate shrink."""
    return _where_trained(tokens_N, torch.ones((), dtype=torch.float64))


def seq_mean_token_sum(tokens_N: Tensor, longest: int) -> Tensor:
    """1 / sequences: the mean over sequences of the sum over their tokens, as in REINFORCE."""
    return _where_trained(tokens_N, 1.0 / _sequences(tokens_N))


AGGREGATIONS: dict[str, Aggregation] = {
    rule.__name__: rule
    for rule in (token_mean, seq_mean_token_mean, seq_mean_token_sum_norm, token_sum, seq_mean_token_sum)
}
"""Rule by its name in the configuration."""


def denominator(rule: str, tokens_N: Tensor) -> float:
    """The part of `rule` that depends on the rest of the batch: weight * denominator only depends on the own sequence.

    So the loss can be summed before all sequences are known, and divided at the end.
    """
    if rule == "token_sum":
        return 1.0
    return float(tokens_N.sum().clamp(min=1)) if rule == "token_mean" else float(_sequences(tokens_N))


def _sequences(tokens_N: Tensor) -> Tensor:
    """Number of sequences with a token, at least 1; float64."""
    return (tokens_N > 0).sum().clamp(min=1).double()


def _where_trained(tokens_N: Tensor, weight: Tensor) -> Tensor:
    return torch.where(tokens_N > 0, weight, torch.zeros_like(weight))
