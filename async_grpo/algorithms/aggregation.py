"""How the losses of tokens become the loss of a batch: one weight for all tokens of a sequence.

    loss = sum over sequences i of weight_i * (sum of the losses of its trained tokens)

The weights come from the whole batch and are known before the step. The sum is linear, so its
value and gradient do not depend on how sequences fall into micro-batches and ranks.

Shapes: tokens_N, trained tokens of each of the N sequences of the batch (0: masked out).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def token_mean(tokens_N: Tensor) -> Tensor:
    """1 / (trained tokens of the batch): every token counts the same. DAPO, arXiv 2503.14476."""
    weight = 1.0 / tokens_N.sum().clamp(min=1).double()
    return torch.where(tokens_N > 0, weight, torch.zeros_like(weight))


def seq_mean_token_mean(tokens_N: Tensor) -> Tensor:
    """1 / (sequences * own tokens): every sequence counts the same. GRPO, arXiv 2402.03300."""
    sequences = (tokens_N > 0).sum().clamp(min=1).double()
    weight_N = 1.0 / (sequences * tokens_N.clamp(min=1))
    return torch.where(tokens_N > 0, weight_N, torch.zeros_like(weight_N))


AGGREGATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
}
"""Rule by its name in the configuration."""
