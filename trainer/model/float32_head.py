"""Logits in float32 from a bfloat16 output layer (`model.fp32_head`).

    forward     hidden [bfloat16] @ W [bfloat16] -> logits, summed and stored in float32
    backward    the gradient of the logits is rounded to bfloat16; then two bfloat16 products, as without this option

A bfloat16 output layer rounds its logits: between 8 and 16 they are multiples of 1/16. Trainer and engine sum in
different orders, so they round some logits differently, and this is most of the difference between their
log-probabilities. A product of two bfloat16 numbers is exact in float32, so float32 logits differ only in the last
digits (MiniMax-M1, arXiv 2506.13585; ScaleRL, arXiv 2510.13786).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def float32_logits(hidden_1MH: Tensor, weight_VH: Tensor) -> Tensor:
    """Return float32 logits [1, M, V] of bfloat16 hidden states; the gradients of both arguments are bfloat16.

    The caller may overwrite the logits: the backward pass does not use them.
    """
    logits_1MV: Tensor = _Float32Logits.apply(hidden_1MH, weight_VH)
    return logits_1MV


class _Float32Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_1MH: Tensor, weight_VH: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_1MH, weight_VH)
        weight_1HV = weight_VH.t()[None]
        # A batched product of one matrix, because its result is no view. torch forbids changing a view that a Function
        # returns, and the caller divides the logits in place.
        if hidden_1MH.device.type == "cuda":
            return torch.bmm(hidden_1MH, weight_1HV, out_dtype=torch.float32)
        return torch.bmm(hidden_1MH.float(), weight_1HV.float())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden_1MH, weight_VH = ctx.saved_tensors
        gradient_MV = gradients[0][0].to(weight_VH.dtype)
        hidden_gradient_1MH = (gradient_MV @ weight_VH)[None] if ctx.needs_input_grad[0] else None
        weight_gradient_VH = gradient_MV.t() @ hidden_1MH[0] if ctx.needs_input_grad[1] else None
        return hidden_gradient_1MH, weight_gradient_VH
