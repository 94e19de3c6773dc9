"""Aggregates token losses into the loss of a batch: each sequence has one weight for all of its tokens.

    loss = sum over sequences i of weight_i * (sum of the losses of its trained tokens)

The weights are computed from the whole batch before the step. The sum is linear, so its value and gradient do not
depend on the assignment of sequences to micro-batches and ranks. Weights are computed before tokens are rejected:
a rejected token adds 0 to the sum and stays in the denominator, so rejection never makes the gradient of the other
tokens larger.

Shapes: tokens_N, number of tokens of each of the N sequences of the batch (0 if no verifier could judge it).
`max_tokens` is the maximum length of a completion, a constant of the run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Aggregation = Callable[[Tensor, int], Tensor]
"""(tokens_N, max_tokens) -> weight of each token of each sequence, float64 [N]."""


def token_mean(tokens_N: Tensor, max_tokens: int) -> Tensor:
    """1 / (tokens of the batch): all tokens have the same weight. DAPO, arXiv 2503.14476."""
    return _where_trained(tokens_N, 1.0 / tokens_N.sum().clamp(min=1).double())


def seq_mean_token_mean(tokens_N: Tensor, max_tokens: int) -> Tensor:
    """1 / (sequences * own tokens): all sequences have the same weight. GRPO, arXiv 2402.03300."""
    return _where_trained(tokens_N, 1.0 / (_sequence_count(tokens_N) * tokens_N.clamp(min=1)))


def seq_mean_token_sum_norm(tokens_N: Tensor, max_tokens: int) -> Tensor:
    """1 / (sequences * max_tokens): a constant divisor, so no bias by length. Dr. GRPO, arXiv 2503.20783."""
    return _where_trained(tokens_N, 1.0 / (_sequence_count(tokens_N) * max_tokens))


def token_sum(tokens_N: Tensor, max_tokens: int) -> Tensor:
    """1: the plain sum over tokens. It grows with the batch; scale the learning rate accordingly."""
    return _where_trained(tokens_N, torch.ones((), dtype=torch.float64))


def seq_mean_token_sum(tokens_N: Tensor, max_tokens: int) -> Tensor:
    """1 / sequences: the mean over sequences of the sum over their tokens, as in REINFORCE."""
    return _where_trained(tokens_N, 1.0 / _sequence_count(tokens_N))


AGGREGATIONS: dict[str, Aggregation] = {
    rule.__name__: rule
    for rule in (token_mean, seq_mean_token_mean, seq_mean_token_sum_norm, token_sum, seq_mean_token_sum)
}
"""Aggregations by their names in the configuration."""


def aggregation_denominator(rule: str, tokens_N: Tensor) -> float:
    """The factor of `rule` that depends on the whole batch; weight * denominator depends on the own sequence only.

    The trainer can therefore sum the loss while sequences still arrive, and divide once all of them are there.
    """
    if rule == "token_sum":
        return 1.0
    if rule == "token_mean":
        return float(tokens_N.sum().clamp(min=1))
    return float(_sequence_count(tokens_N))


def _sequence_count(tokens_N: Tensor) -> Tensor:
    """Number of sequences with a token, at least 1; float64."""
    return (tokens_N > 0).sum().clamp(min=1).double()


def _where_trained(tokens_N: Tensor, weight: Tensor) -> Tensor:
    """Weights of the sequences with tokens, 0 for the others."""
    return torch.where(tokens_N > 0, weight, torch.zeros_like(weight))
