"""Aggregates token losses into the loss of a batch: each sequence has one weight for all of its tokens.

    loss = sum over sequences i of weight_i * (sum of the losses of its trained tokens)

The weights are computed from the whole batch before the step. The sum is linear, so its value and gradient do not
depend on the assignment of sequences to micro-batches and ranks. Weights are computed before tokens are rejected:
a rejected token adds 0 to the sum and stays in the denominator, so rejection never makes the gradient of the other
tokens larger.

Shapes: tokens_N, number of tokens of each of the N sequences of the batch (0 if no verifier could judge it); groups_N,
index of the group of each sequence. `max_tokens` is the maximum length of a completion, a constant of the run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Aggregation = Callable[[Tensor, Tensor, int], Tensor]
"""(tokens_N, groups_N, max_tokens) -> weight of each token of each sequence, float64 [N]."""


def token_mean(tokens_N: Tensor, groups_N: Tensor, max_tokens: int) -> Tensor:
    """1 / (tokens of the batch): all tokens have the same weight. DAPO, arXiv 2503.14476."""
    return _where_trained(tokens_N, 1.0 / tokens_N.sum().clamp(min=1).double())


def seq_mean_token_mean(tokens_N: Tensor, groups_N: Tensor, max_tokens: int) -> Tensor:
    """1 / (sequences * own tokens): all sequences have the same weight. GRPO, arXiv 2402.03300."""
    return _where_trained(tokens_N, 1.0 / (_sequence_count(tokens_N) * tokens_N.clamp(min=1)))


def seq_mean_token_sum_norm(tokens_N: Tensor, groups_N: Tensor, max_tokens: int) -> Tensor:
    """1 / (sequences * max_tokens): a constant divisor, so no bias by length. Dr. GRPO, arXiv 2503.20783."""
    return _where_trained(tokens_N, 1.0 / (_sequence_count(tokens_N) * max_tokens))


def token_sum(tokens_N: Tensor, groups_N: Tensor, max_tokens: int) -> Tensor:
    """1: the plain sum over tokens. It grows with the batch; scale the learning rate accordingly."""
    return _where_trained(tokens_N, torch.ones((), dtype=torch.float64))


def seq_mean_token_sum(tokens_N: Tensor, groups_N: Tensor, max_tokens: int) -> Tensor:
    """1 / sequences: the mean over sequences of the sum over their tokens, as in REINFORCE."""
    return _where_trained(tokens_N, 1.0 / _sequence_count(tokens_N))


def prompt_mean(tokens_N: Tensor, groups_N: Tensor, max_tokens: int) -> Tensor:
    """1 / (groups * tokens of the own group): every prompt counts the same. ScaleRL, arXiv 2510.13786."""
    group_tokens_N = _group_tokens(tokens_N, groups_N)[groups_N]
    return _where_trained(tokens_N, 1.0 / (_groups(tokens_N, groups_N) * group_tokens_N.clamp(min=1)))


AGGREGATIONS: dict[str, Aggregation] = {
    rule.__name__: rule
    for rule in (token_mean, seq_mean_token_mean, seq_mean_token_sum_norm, token_sum, seq_mean_token_sum, prompt_mean)
}
"""Aggregations by their names in the configuration."""


def aggregation_denominator(rule: str, tokens_N: Tensor, groups_N: Tensor) -> float:
    """The factor of `rule` that depends on other groups; weight * denominator depends on the own group only.

    The trainer can therefore sum the loss while groups still arrive, and divide once all of them are there.
    """
    if rule == "token_sum":
        return 1.0
    if rule == "token_mean":
        return float(tokens_N.sum().clamp(min=1))
    if rule == "prompt_mean":
        return float(_groups(tokens_N, groups_N))
    return float(_sequence_count(tokens_N))


def _sequence_count(tokens_N: Tensor) -> Tensor:
    """Number of sequences with a token, at least 1; float64."""
    return (tokens_N > 0).sum().clamp(min=1).double()


def _group_tokens(tokens_N: Tensor, groups_N: Tensor) -> Tensor:
    """Number of tokens of each group; int64 [groups]."""
    groups = int(groups_N.max()) + 1 if len(groups_N) else 0
    return tokens_N.new_zeros(groups).index_add(0, groups_N, tokens_N)


def _groups(tokens_N: Tensor, groups_N: Tensor) -> Tensor:
    """Number of groups with a token, at least 1; float64."""
    return (_group_tokens(tokens_N, groups_N) > 0).sum().clamp(min=1).double()


def _where_trained(tokens_N: Tensor, weight: Tensor) -> Tensor:
    """Weights of the sequences with tokens, 0 for the others."""
    return torch.where(tokens_N > 0, weight, torch.zeros_like(weight))
