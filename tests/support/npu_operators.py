"""Operators of torch_npu 2.10 and MindSpeed in plain PyTorch, on the CPU, with the limits that their documents state.

    operator                        source
    npu_fusion_attention (TND)      torch_npu/_op_plugin_docs.py, csrc/aten/npu_native_functions_by_codegen.yaml of the
    npu_rms_norm, npu_swiglu,       wheel torch-npu 2.10.0.post4: what they compute, and their schemas (`SCHEMAS`)
    npu_rotary_mul
    npu_grouped_matmul              its schema; the arguments of MindSpeed core_r0.16.0, grouped_matmul_util.py
    npu_rotary_position_embedding   MindSpeed core_r0.16.0, ops/csrc/cann/npu_rotary_position_embedding.cpp

The fused AdamW of MindSpeed is `torch._fused_adamw_`, which torch has for the CPU. What a document forbids raises
RuntimeError here. Results of an operator in bfloat16 are computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SCHEMAS = {
    "npu_fusion_attention": (
        "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, "
        "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., "
        "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, "
        "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
        'bool sync=False, str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, '
        "int offset=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
    ),
    "npu_grouped_matmul": (
        "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, "
        "Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, "
        "Tensor[]? per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None, "
        "Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0, "
        "int? group_type=None, int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, "
        "int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, "
        "int? per_token_scale_dtype=None) -> Tensor[]"
    ),
    "npu_rms_norm": "npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_rotary_mul": (
        "npu_rotary_mul(Tensor self, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor"
    ),
    "npu_swiglu": "npu_swiglu(Tensor self, int dim=-1) -> Tensor",
}
"""As torch_npu registers them; tests/upstream holds them against the wheel."""

MAX_SEGMENTS = 1024
"""Sequences that one call in the layout TND takes."""
_TRIANGLE = 2048
_RIGHT_DOWN_CAUSAL = 3


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Attention within packed sequences, [T, heads, d] each: the layout TND with sparse mode 3, and nothing else.

    The ends of the sequences are numbers of the host, and the last one is T. Of the seven results only the first is
    computed; the statistics of the softmax, for which nobody asks, are empty.
    """
    _check(input_layout == "TND" and sparse_mode == _RIGHT_DOWN_CAUSAL, "only TND with sparse mode 3 is written here")
    _check(not others, f"not written here: {sorted(others)}")
    _check(keep_prob == 1.0, "dropout is not written here")
    _check_attention(query, key, value, head_num, atten_mask)
    queries, keys, values = (
        part.split(_lengths(ends, len(part)))
        for part, ends in ((query, actual_seq_qlen), (key, actual_seq_kvlen), (value, actual_seq_kvlen))
    )
    out = torch.cat([_attend(*each, scale) for each in zip(queries, keys, values, strict=True)])
    empty = query.new_empty(0)
    return out, empty, empty, empty, 0, 0, 0


def _check_attention(query: Tensor, key: Tensor, value: Tensor, head_num: int, atten_mask: Tensor | None) -> None:
    _check(query.dim() == key.dim() == value.dim() == 3, "TND: [tokens, heads, width]")
    _check(query.dtype == key.dtype == value.dtype, f"one dtype, not {query.dtype}, {key.dtype}, {value.dtype}")
    _check(query.dtype in (torch.float16, torch.bfloat16, torch.float32), f"no {query.dtype}")
    _check(query.shape[1] == head_num and head_num % key.shape[1] == 0, "head_num: of the queries, a multiple of keys'")
    _check(query.shape[2] == key.shape[2] <= 768 and key.shape == value.shape, "widths of heads: equal, up to 768")
    _check(1 <= len(query) <= 2**20, "1 to 1M tokens")
    _check(atten_mask is not None and atten_mask.dtype in (torch.bool, torch.uint8), "sparse mode 3 needs its mask")
    assert atten_mask is not None
    triangle = torch.ones(_TRIANGLE, _TRIANGLE, dtype=torch.bool).triu(1)
    _check(torch.equal(atten_mask.bool(), triangle), "the mask is a 2048 x 2048 triangle, True where nothing is seen")


def _lengths(ends: Sequence[int] | None, tokens: int) -> list[int]:
    """The lengths of sequences that end there."""
    if not isinstance(ends, list | tuple) or not all(type(end) is int for end in ends):
        raise TypeError(f"ends of sequences are a list of integers on the host, not {type(ends).__name__}")
    _check(1 <= len(ends) <= MAX_SEGMENTS, f"1 to {MAX_SEGMENTS} sequences, not {len(ends)}")
    lengths = [end - begin for begin, end in pairwise([0, *ends])]
    _check(min(lengths) >= 0 and ends[-1] == tokens, f"ends that rise to {tokens} tokens")
    return lengths


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """One sequence: [t, heads, d]; the last query sees the last key."""
    repeats = query.shape[1] // key.shape[1]
    wide_query, wide_key, wide_value = (
        part.float().transpose(0, 1)
        for part in (query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1))
    )
    scores = wide_query @ wide_key.transpose(1, 2) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + scores.shape[2] - scores.shape[1])
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ wide_value).transpose(0, 1).to(query.dtype)


def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    group_list: Tensor,
    split_item: int = 0,
    group_type: int = -1,
    group_list_type: int = 0,
    **others: Any,
) -> list[Tensor]:
    """One tensor in and one out, as MindSpeed calls it: groups of rows (0), or of what is summed over (2)."""
    _check(not others, f"not written here: {sorted(others)}")
    _check(split_item == 3 and group_list_type == 0, "only one tensor in and out, and ends of groups, are written here")
    _check(len(x) == len(weight) == 1 and x[0].dtype == weight[0].dtype, "one tensor each, of one dtype")
    _check(group_list.dtype == torch.int64 and group_list.dim() == 1, "the ends of groups are int64 [groups]")
    left = x[0]
    right = weight[0]
    ends = group_list.tolist()
    lengths = [end - begin for begin, end in pairwise([0, *ends])]
    _check(min(lengths) >= 0, "ends rise")
    if group_type == 0:
        _check(left.dim() == 2 and right.dim() == 3 and len(right) == len(ends), "[m, k] and [groups, k, n]")
        _check(ends[-1] == len(left), "the last group ends with the rows")
        rows = zip(left.float().split(lengths), right.float(), strict=True)
        return [torch.cat([part @ matrix for part, matrix in rows]).to(left.dtype)]
    _check(group_type == 2 and left.dim() == right.dim() == 2, "group type 2: [m, k] and [k, n]")
    _check(ends[-1] == left.shape[1] == len(right), "the last group ends with what is summed over")
    pairs = zip(left.float().split(lengths, 1), right.float().split(lengths), strict=True)
    return [torch.stack([part @ other for part, other in pairs]).to(left.dtype)]


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(x * rstd * gamma, rstd), with rstd = 1 / sqrt(mean(x^2) + epsilon) in float32."""
    _check(self.dtype == gamma.dtype, f"x is {self.dtype}, but gamma {gamma.dtype}")
    _check(2 <= self.dim() <= 8 and self.shape[self.dim() - gamma.dim() :] == gamma.shape, "gamma has x's last axes")
    axes = tuple(range(self.dim() - gamma.dim(), self.dim()))
    rstd = torch.rsqrt(self.float().pow(2).mean(axes, keepdim=True) + epsilon)
    return (self.float() * rstd * gamma.float()).to(self.dtype), rstd


def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    """a * sigmoid(a) * b of the two halves a and b of `self` along `dim`."""
    _check(1 <= self.dim() <= 8 and self.shape[dim] % 2 == 0, "two halves along dim")
    gate, up = self.float().chunk(2, dim)
    return (F.silu(gate) * up).to(self.dtype)


def npu_rotary_mul(
    self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """r1 * x + r2 * (-x2, x1), of the halves x1 and x2 of the last axis; x is [S, B, N, D], [B, S, N, D] or
    [B, N, S, D], and r1, r2 have 1 in the place of N, and may have 1 in that of B."""
    _check(rotary_mode == "half" and rotate is None, "only rotary_mode half is written here")
    _check(self.dim() == r1.dim() == r2.dim() == 4 and r1.shape == r2.shape, "four axes each")
    width = self.shape[-1]
    _check(width % 2 == 0 and width < 896 and r1.shape[-1] == width, "an even width below 896, the same of r1 and r2")
    _check(self.dtype == r1.dtype == r2.dtype, f"one dtype, not {self.dtype}, {r1.dtype}, {r2.dtype}")
    axes = [size in (1, whole) for size, whole in zip(r1.shape, self.shape, strict=True)]
    _check(all(axes) and min(self.shape[:2]) < 1000 and self.shape[2] < 1000, "B and N are below 1000")
    first, second = self.float().chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return (r1.float() * self.float() + r2.float() * turned).to(self.dtype)


def npu_rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    """MindSpeed's operator of the same formula, which it compiles on the device's host; mode 0 is `half`."""
    _check(mode == 0, "only mode 0 is written here")
    return npu_rotary_mul(x, cos, sin)


def _check(holds: bool, rule: str) -> None:
    if not holds:
        raise RuntimeError(f"the operator refuses it: {rule}")
