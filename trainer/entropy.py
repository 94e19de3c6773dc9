"""The entropy of the next-token distribution where every tensor-parallel rank has a slice of the vocabulary.

H = log Z - sum_v p_v l_v      with three small reductions: of the peak, of Z and of the sum
dH / dl_v = -p_v (log p_v + H) needs only this rank's slice
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor


def vocab_parallel_entropy(logits_NV: Tensor) -> Tensor:
    """[N], in nats, with gradient. `logits_NV` may be overwritten afterwards: nothing of it is kept."""
    entropy_N: Tensor = _VocabParallelEntropy.apply(logits_NV)
    return entropy_N


class _VocabParallelEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor) -> Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        peak_N = logits_NV.amax(-1)
        dist.all_reduce(peak_N, dist.ReduceOp.MAX, group)
        shifted_NV = logits_NV - peak_N[:, None]
        weights_NV = shifted_NV.exp()
        sums_2N = torch.stack([weights_NV.sum(-1), (weights_NV * shifted_NV).sum(-1)])
        dist.all_reduce(sums_2N, group=group)
        total_N, weighted_N = sums_2N
        entropy_N = total_N.log() - weighted_N / total_N
        ctx.save_for_backward(weights_NV.div_(total_N[:, None]), entropy_N)
        return entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        probabilities_NV, entropy_N = ctx.saved_tensors
        gradient_NV: Tensor = torch.special.entr(probabilities_NV) - probabilities_NV * entropy_N[:, None]
        return gradient_NV * gradients[0][:, None]
