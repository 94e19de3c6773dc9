"""Layers for packed sequences: fused kernels of torch (CUDA) and torch_npu (Ascend), and a plain one for the CPU.

Causal attention computes all packed sequences in one call, without repeating key heads. Rotation angles, sequence ends
and lengths are in `PackedSequences`, computed on the host once per micro-batch: reading a number from the device in a
layer would make the host wait for it.

With context parallelism, keys and values of all ranks are gathered, and each sequence is two segments, with causality
aligned at the bottom right (`AttentionSegments`):

    queries of this rank  [front chunk]                [back chunk]
    their keys            [0 .. end of front chunk]    [0 .. end of back chunk]

    VarlenAttention   torch.nn.attention.varlen, whose backend is FlashAttention: bfloat16, from capability 8.0 on
    NpuAttention      torch_npu.npu_fusion_attention with layout TND, causal through mode 3 and one fixed triangle
    NpuRotation       torch_npu.npu_rotary_mul
    PlainAttention    the CPU with context parallelism

docs/platforms.md lists which kernels have run on their devices. The arguments of the others are tested against the same
operators in plain torch.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from trainer.batch.context_parallel import gather_context
from trainer.batch.layout import AttentionSegments, PackedSequences, Rotation

CAUSAL = 3
"""`sparse_mode` of torch_npu: causal, with the last query of a segment aligned to its last key."""

TRIANGLE = 2048
"""Side of the mask that `CAUSAL` requires, whatever the length of the sequences."""

MAX_SEGMENTS = 1024
"""Maximum number of segments per call with layout TND."""

CAUSAL_WINDOW = (-1, 0)
"""`window_size` of torch: all positions before the query, none after it. FlashAttention aligns the last query with the
last key."""

QUERY_BLOCK = 512
"""Queries per call of `PlainAttention`, so that the size of its masks is linear in the sequence length."""

_TRIANGLES: dict[torch.device, Tensor] = {}


class _FusedAttention(MegatronModule):
    """Causal attention within each packed sequence. Has the signature of Megatron's core attention."""

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
        query, key = packed_seq_params.rotate(query, key)
        segments = packed_seq_params.segments
        if segments.keys_K is not None:
            group = parallel_state.get_context_parallel_group()
            gathered = gather_context(torch.stack([key, value], 1), group)
            key, value = gathered.index_select(0, segments.keys_K).unbind(1)
        return self._attend(query, key, value, segments).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, segments: AttentionSegments) -> Tensor:
        """Attention of rotated queries and keys: [T, heads, d]."""
        raise NotImplementedError


class VarlenAttention(_FusedAttention):
    """`torch.nn.attention.varlen.varlen_attn`."""

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, segments: AttentionSegments) -> Tensor:
        from torch.nn.attention import varlen

        out: Tensor = varlen.varlen_attn(
            query,
            key,
            value,
            segments.query_offsets,
            segments.key_offsets,
            segments.longest_query,
            segments.longest_key,
            scale=self.scale,
            window_size=CAUSAL_WINDOW,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out


class PlainAttention(_FusedAttention):
    """torch's scaled_dot_product_attention, one call per block of queries. The reference for the kernels."""

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, segments: AttentionSegments) -> Tensor:
        outputs = []
        queries = query.tensor_split(segments.query_ends[:-1])
        keys = key.tensor_split(segments.key_ends[:-1])
        values = value.tensor_split(segments.key_ends[:-1])
        for segment in zip(queries, keys, values, strict=True):
            q, k, v = (part.transpose(0, 1)[None] for part in segment)  # [1, heads, tokens, d]
            visible_keys = k.shape[2] - q.shape[2]  # the last query is aligned with the last key
            for block in q.split(QUERY_BLOCK, 2):
                rows = block.shape[2]
                visible_keys += rows
                mask = torch.ones(rows, visible_keys, dtype=torch.bool, device=q.device).tril(visible_keys - rows)
                out = F.scaled_dot_product_attention(
                    block,
                    k[:, :, :visible_keys],
                    v[:, :, :visible_keys],
                    attn_mask=mask,
                    scale=self.scale,
                    enable_gqa=q.shape[1] != k.shape[1],
                )
                outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)


def has_varlen_attention() -> bool:
    """True if torch's `varlen_attn` accepts fewer key heads than query heads. That of torch 2.10 has no such option."""
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

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, segments: AttentionSegments) -> Tensor:
        outputs = []
        first_query = first_key = 0
        for first in range(0, len(segments.query_ends), MAX_SEGMENTS):
            query_ends = segments.query_ends[first : first + MAX_SEGMENTS]
            key_ends = segments.key_ends[first : first + MAX_SEGMENTS]
            outputs.append(
                self._call_kernel(
                    query[first_query : query_ends[-1]],
                    key[first_key : key_ends[-1]],
                    value[first_key : key_ends[-1]],
                    query_ends=[end - first_query for end in query_ends],
                    key_ends=[end - first_key for end in key_ends],
                )
            )
            first_query = query_ends[-1]
            first_key = key_ends[-1]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _call_kernel(
        self, query: Tensor, key: Tensor, value: Tensor, *, query_ends: list[int], key_ends: list[int]
    ) -> Tensor:
        out: Tensor = self._kernel(
            query,
            key,
            value,
            query.shape[1],
            input_layout="TND",
            atten_mask=_triangle_mask(query.device),
            scale=self.scale,
            keep_prob=1.0,
            sparse_mode=CAUSAL,
            actual_seq_qlen=query_ends,
            actual_seq_kvlen=key_ends,
        )[0]
        return out


def _triangle_mask(device: torch.device) -> Tensor:
    """Return the mask, True at positions to ignore. All layers share one tensor."""
    if device not in _TRIANGLES:
        ones = torch.ones(TRIANGLE, TRIANGLE, dtype=torch.bool, device=device)
        _TRIANGLES[device] = ones.triu(1)
    return _TRIANGLES[device]


class NpuRotation(Rotation):
    """`torch_npu.npu_rotary_mul`, with layout BSND and a batch of one.

    MindSpeed's `use_fused_rotary_pos_emb` calls the same kernel, but compiles its operator on every host, and for
    packed sequences Megatron reads their lengths from the device before it calls it.
    """

    def __call__(self, heads: Tensor) -> Tensor:
        """[T, heads, d] -> [T, heads, d]"""
        kernel = importlib.import_module("torch_npu").npu_rotary_mul
        rotated: Tensor = kernel(heads[None].contiguous(), self.cos[None], self.sin[None])
        return rotated[0]
