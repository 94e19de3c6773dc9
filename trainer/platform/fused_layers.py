"""Layers by the fused kernels of torch (CUDA) and torch_npu (Ascend), where a platform has no package that brings them.

Causal attention takes the packed sequences in one call, with as many key heads as there are. What is rotated, where
the sequences end and how long they are is in `PackedSequences`, found once for each micro-batch: no layer here reads a
number from the device.

    VarlenAttention   torch.nn.attention.varlen, whose backend is FlashAttention: bfloat16, from capability 8.0 on
    NpuAttention      torch_npu.npu_fusion_attention in the layout TND, causal by mode 3 and one fixed triangle
    NpuRotation       torch_npu.npu_rotary_mul

None has run on its device yet (docs/platforms.md); the arguments are tested against the operators in plain torch.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from trainer.batch.packed import PackedSequences, Rotation

CAUSAL = 3
"""`sparse_mode` of torch_npu: position i of a query sees positions up to i of its sequence."""

TRIANGLE = 2048
"""Side of the mask that this mode wants."""

MOST_SEQUENCES = 1024
"""Sequences that one call in the layout TND takes."""

CAUSAL_WINDOW = (-1, 0)
"""`window_size` of torch: all positions before, none behind."""

_TRIANGLES: dict[torch.device, Tensor] = {}


class _FusedAttention(MegatronModule):
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
        query, key = packed_seq_params.rotated(query, key)
        return self._attend(query, key, value, packed_seq_params).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        """[T, heads, d], of rotated queries and keys."""
        raise NotImplementedError


class VarlenAttention(_FusedAttention):
    """`torch.nn.attention.varlen.varlen_attn`."""

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        from torch.nn.attention import varlen

        offsets, longest = packed.cu_seqlens_q, packed.max_seqlen_q
        out: Tensor = varlen.varlen_attn(
            query,
            key,
            value,
            offsets,
            offsets,
            longest,
            longest,
            scale=self.scale,
            window_size=CAUSAL_WINDOW,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out


def has_varlen_attention() -> bool:
    """Whether torch's `varlen_attn` takes fewer key heads than query heads; that of torch 2.10 does not say so."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()


class NpuAttention(_FusedAttention):
    """`torch_npu.npu_fusion_attention`."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._kernel = importlib.import_module("torch_npu").npu_fusion_attention

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        outputs, start = [], 0
        for first in range(0, len(packed.ends), MOST_SEQUENCES):
            ends = [end - start for end in packed.ends[first : first + MOST_SEQUENCES]]
            parts = (part[start : start + ends[-1]] for part in (query, key, value))
            outputs.append(self._call(*parts, ends=ends))
            start += ends[-1]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _call(self, query: Tensor, key: Tensor, value: Tensor, *, ends: list[int]) -> Tensor:
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
        return out


def _triangle(device: torch.device) -> Tensor:
    """The mask, True where a query sees nothing; one tensor for all layers."""
    if device not in _TRIANGLES:
        ones = torch.ones(TRIANGLE, TRIANGLE, dtype=torch.bool, device=device)
        _TRIANGLES[device] = ones.triu(1)
    return _TRIANGLES[device]


class NpuRotation(Rotation):
    """`torch_npu.npu_rotary_mul`, in the layout BSND with a batch of one.

    MindSpeed has the same behind `use_fused_rotary_pos_emb`, but compiles its operator on every host, and is called by
    Megatron for packed sequences only after Megatron has read their lengths from the device.
    """

    def __call__(self, heads: Tensor) -> Tensor:
        """[T, heads, d] -> [T, heads, d]"""
        kernel = importlib.import_module("torch_npu").npu_rotary_mul
        rotated: Tensor = kernel(heads[None].contiguous(), self.cos[None], self.sin[None])
        return rotated[0]
