"""Log-probabilities under truncated sampling, normalised over the tokens that the engine kept.

    logits_NV (this rank's slice of the vocabulary)
        --gather_kept--> z_NW, on every tensor-parallel rank
        --repetition penalty, / T--> log-softmax over the W kept tokens

W, the maximum number of kept tokens at a position, is a few tens. So no tensor here has the size of the vocabulary
except the gradient of the logits, which is needed anyway. The order is that of vLLM's sampler: repetition penalty on
the raw logits, then the temperature, then truncation.

    log pi(y) = z_y - log sum_{v kept} exp(z_v)           H = -sum_{v kept} pi(v) log pi(v)
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from async_grpo.wire.sampling_mask import PADDING
from trainer.batch.sequences import KeptTokens


def masked_logprobs(
    logits_NV: Tensor, labels_N: Tensor, kept: KeptTokens, *, temperature: float, repetition_penalty: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the labels and entropies over the kept tokens, both float [N] with gradient.

    Args:
        logits_NV: Raw logits of this rank's slice of the vocabulary.
        labels_N: int64, the sampled tokens.
        kept: The tokens to normalise over.
        temperature: Temperature of the sampler.
        repetition_penalty: Divides positive and multiplies negative logits of the repeated tokens.
    """
    logits_NW = gather_kept(logits_NV, kept.ids_NW)
    if repetition_penalty != 1:
        penalised_NW = torch.where(logits_NW > 0, logits_NW / repetition_penalty, logits_NW * repetition_penalty)
        logits_NW = torch.where(kept.repeated_NW, penalised_NW, logits_NW)

    is_padding_NW = kept.ids_NW == PADDING
    logprobs_NW = (logits_NW / temperature).masked_fill(is_padding_NW, -math.inf).log_softmax(-1)
    # Padding has log-probability -inf, and 0 * inf would be NaN in the entropy and its gradient. So replace it by a
    # finite number with weight 0.
    logprobs_NW = logprobs_NW.masked_fill(is_padding_NW, 0.0)
    probabilities_NW = logprobs_NW.exp().masked_fill(is_padding_NW, 0.0)
    entropy_N = -(probabilities_NW * logprobs_NW).sum(-1)

    column_N1 = (kept.ids_NW == labels_N[:, None]).to(torch.uint8).argmax(-1, keepdim=True)
    return logprobs_NW.gather(1, column_N1)[:, 0], entropy_N


def gather_kept(logits_NV: Tensor, ids_NW: Tensor) -> Tensor:
    """Return the logits of the tokens `ids_NW` from all slices of the vocabulary, [N, W]; 0 at PADDING."""
    gathered_NW: Tensor = _GatherKept.apply(logits_NV, ids_NW)
    return gathered_NW


class _GatherKept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, ids_NW: Tensor) -> Tensor:
        size = logits_NV.shape[-1]
        local_NW = ids_NW - parallel_state.get_tensor_model_parallel_rank() * size
        # PADDING is negative, so it is outside every slice and no rank adds a logit for it.
        is_local_NW = (local_NW >= 0) & (local_NW < size) & (ids_NW != PADDING)
        local_NW = local_NW.clamp(0, size - 1)
        ctx.save_for_backward(local_NW, is_local_NW)
        ctx.shape = logits_NV.shape

        gathered_NW = logits_NV.gather(1, local_NW).masked_fill_(~is_local_NW, 0.0)
        dist.all_reduce(gathered_NW, group=parallel_state.get_tensor_model_parallel_group())
        return gathered_NW

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # Every rank computes the same loss from the same gathered logits, so each takes the gradient of its own slice
        # and nothing is summed over ranks.
        local_NW, is_local_NW = ctx.saved_tensors
        gradient_NV = gradients[0].new_zeros(ctx.shape)
        gradient_NV.scatter_add_(1, local_NW, gradients[0].masked_fill(~is_local_NW, 0.0))
        return gradient_NV, None
