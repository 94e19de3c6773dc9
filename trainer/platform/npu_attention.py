"""Causal attention within packed sequences by the NPU's fused kernel.

`torch_npu.npu_fusion_attention` in the layout TND takes sequences that lie end to end, as Megatron's `thd` has them,
with the ends of the sequences as numbers of the host. Causality is told by mode 3 and one fixed 2048 x 2048 triangle,
whatever the lengths are. Key heads may be fewer than query heads.

Has not run on an NPU yet (docs/platforms.md); the arguments are tested against a stand-in that computes them.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from trainer.batch.packed import PackedSequences

CAUSAL = 3
"""`sparse_mode`: position i of a query sees positions up to i of its sequence."""

TRIANGLE = 2048
"""Side of the mask that this mode wants."""

_TRIANGLES: dict[torch.device, Tensor] = {}


class FusedAttention(MegatronModule):
    """Causal attention within each packed sequence, in one kernel. Signature: Megatron's core attention."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_others: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or config.kv_channels**-0.5
        self._kernel = importlib.import_module("torch_npu").npu_fusion_attention

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences,
        **_others: Any,
    ) -> Tensor:
        """query [T, heads, d], key and value [T, groups, d] -> [T, heads * d]"""
        ends = packed_seq_params.cu_seqlens_q[1:].tolist()
        out: Tensor = self._kernel(
            query,
            key,
            value,
            query.shape[1],
            input_layout="TND",
            atten_mask=_triangle(query.device),
            scale=self.scale,
            keep_prob=1.0,
            sparse_mode=CAUSAL,
            actual_seq_qlen=ends,
            actual_seq_kvlen=ends,
        )[0]
        return out.reshape(out.shape[0], -1)


def _triangle(device: torch.device) -> Tensor:
    """The mask, True where a query sees nothing; one tensor for all layers."""
    if device not in _TRIANGLES:
        ones = torch.ones(TRIANGLE, TRIANGLE, dtype=torch.bool, device=device)
        _TRIANGLES[device] = ones.triu(1)
    return _TRIANGLES[device]
