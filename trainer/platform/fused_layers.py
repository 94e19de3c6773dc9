"""Layers that take packed tokens as they lie: fused kernels of torch (CUDA) and torch_npu (Ascend), and a plain one.

Causal attention takes the packed sequences in one call, with as many key heads as there are. What is rotated, where
the sequences end and how long they are is in `PackedSequences`, found once for each micro-batch: no layer here reads a
number from the device.

Where several ranks share sequences (context parallelism), keys and values of all ranks are gathered, and each sequence
is two segments, with causality aligned at the bottom right (`AttentionSegments`):

    queries of this rank  [front chunk]                [back chunk]
    their keys            [0 .. end of front chunk]    [0 .. end of back chunk]

    VarlenAttention   torch.nn.attention.varlen, whose backend is FlashAttention: bfloat16, from capability 8.0 on
    NpuAttention      torch_npu.npu_fusion_attention in the layout TND, causal by mode 3 and one fixed triangle
    NpuRotation       torch_npu.npu_rotary_mul
    PlainAttention    for the CPU, where ranks share sequences

The kernels have not run on their devices yet (docs/platforms.md); the arguments are tested against the operators in
plain torch.
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
"""`sparse_mode` of torch_npu: the last query of a segment sees its last key, the one before it one key less."""

TRIANGLE = 2048
"""Side of the mask that this mode wants."""

MOST_SEQUENCES = 1024
"""Segments that one call in the layout TND takes."""

CAUSAL_WINDOW = (-1, 0)
"""`window_size` of torch: all positions before, none behind. FlashAttention aligns the last query with the last key."""

QUERY_BLOCK = 512
"""Queries of one call of `PlainAttention`, so that its masks grow with the keys and not with their square."""

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
        query, key = packed_seq_params.rotate(query, key)
        segments = packed_seq_params.segments
        if segments.keys_K is not None:
            group = parallel_state.get_context_parallel_group()
            gathered = gather_context(torch.stack([key, value], 1), group)
            key, value = gathered.index_select(0, segments.keys_K).unbind(1)
        return self._attend(query, key, value, segments).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, segments: AttentionSegments) -> Tensor:
        """[T, heads, d], of rotated queries and keys."""
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
    """torch's scaled_dot_product_attention, a few calls for each segment: the reference of the kernels."""

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, segments: AttentionSegments) -> Tensor:
        outputs = []
        queries = query.tensor_split(segments.query_ends[:-1])
        keys = key.tensor_split(segments.key_ends[:-1])
        values = value.tensor_split(segments.key_ends[:-1])
        for segment in zip(queries, keys, values, strict=True):
            q, k, v = (part.transpose(0, 1)[None] for part in segment)  # [1, heads, tokens, d]
            before = k.shape[2] - q.shape[2]
            blocks = q.split(QUERY_BLOCK, 2)
            for number, block in enumerate(blocks):
                rows = block.shape[2]
                seen = before + number * QUERY_BLOCK + rows
                mask = torch.ones(rows, seen, dtype=torch.bool, device=q.device).tril(seen - rows)
                out = F.scaled_dot_product_attention(
                    block,
                    k[:, :, :seen],
                    v[:, :, :seen],
                    attn_mask=mask,
                    scale=self.scale,
                    enable_gqa=q.shape[1] != k.shape[1],
                )
                outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)


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

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, segments: AttentionSegments) -> Tensor:
        outputs = []
        first_query = first_key = 0
        for first in range(0, len(segments.query_ends), MOST_SEQUENCES):
            query_ends = segments.query_ends[first : first + MOST_SEQUENCES]
            key_ends = segments.key_ends[first : first + MOST_SEQUENCES]
            outputs.append(
                self._call(
                    query[first_query : query_ends[-1]],
                    key[first_key : key_ends[-1]],
                    value[first_key : key_ends[-1]],
                    query_ends=[end - first_query for end in query_ends],
                    key_ends=[end - first_key for end in key_ends],
                )
            )
            first_query, first_key = query_ends[-1], key_ends[-1]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _call(self, query: Tensor, key: Tensor, value: Tensor, *, query_ends: list[int], key_ends: list[int]) -> Tensor:
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
            actual_seq_qlen=query_ends,
            actual_seq_kvlen=key_ends,
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
