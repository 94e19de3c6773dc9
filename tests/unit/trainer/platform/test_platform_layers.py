"""Layers of accelerators take the places of our own: same names, same numbers, all tensors on one device."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import Any

import pytest
import torch
from megatron.core.extensions import transformer_engine as extension
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch._subclasses.fake_tensor import FakeTensorMode

from async_grpo.errors import DependencyError
from tests.support.npu_operators import npu_fusion_attention
from trainer.batch import packed as packed_batch
from trainer.model import layers as own
from trainer.model.policy import to_device
from trainer.platform import cuda
from trainer.platform.npu import NpuPlatform
from trainer.platform.npu_attention import FusedAttention

HEADS, GROUPS, DIM = 4, 2, 16
LENGTHS = [5, 12, 1, 7]


Norm, Column, Row, Attention = (type(name, (), {}) for name in ("Norm", "Column", "Row", "Attention"))


@pytest.fixture
def their_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine, as far as the spec sees it."""
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(extension, "TENorm", Norm)
    monkeypatch.setattr(extension, "TEColumnParallelLinear", Column)
    monkeypatch.setattr(extension, "TERowParallelLinear", Row)
    monkeypatch.setattr(extension, "TEDotProductAttention", Attention)


@pytest.fixture(autouse=True)
def _one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "get_num_layers_to_build", lambda config: 2)


def model_config(dtype: torch.dtype = torch.bfloat16, context_parallel: int = 1, **more: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=DIM,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        context_parallel_size=context_parallel,
        normalization="RMSNorm",
        **more,
    )


def classes_in(node: Any) -> set[type]:
    if isinstance(node, type):
        return {node}
    if isinstance(node, list | tuple):
        return {found for child in node for found in classes_in(child)}
    parts = vars(node).values() if hasattr(node, "__dataclass_fields__") else ()
    return {found for child in parts for found in classes_in(child)}


@pytest.mark.usefixtures("their_layers")
def test_transformer_engine_takes_every_place_that_was_ours_and_parameters_keep_their_names() -> None:
    config = model_config(qk_layernorm=True)
    spec = own.block_spec(config, cuda.transformer_engine_layers(config))
    found = classes_in(spec)
    assert found >= {Norm, Column, Row, Attention}
    assert not found & {own.RMSNorm, own.PackedAttention, ColumnParallelLinear, RowParallelLinear}
    layer = spec.layer_specs[0].submodules  # norms stay beside the linear layers
    assert layer.input_layernorm is layer.pre_mlp_layernorm is Norm
    assert layer.self_attention.submodules.linear_qkv is layer.mlp.submodules.linear_fc1 is Column


@pytest.mark.usefixtures("their_layers")
@pytest.mark.parametrize(("dtype", "context_parallel"), [(torch.float32, 1), (torch.bfloat16, 2)])
def test_attention_stays_ours_where_their_kernels_cannot_do_it(dtype: torch.dtype, context_parallel: int) -> None:
    config = model_config(dtype, context_parallel)
    found = classes_in(own.block_spec(config, cuda.transformer_engine_layers(config)))
    assert own.PackedAttention in found
    assert Attention not in found


def test_the_spec_that_was_given_stays_as_it_was() -> None:
    spec = own.block_spec(model_config())
    own.replace_modules(spec, {own.PackedAttention: FusedAttention})
    assert own.PackedAttention in classes_in(spec)


def test_a_broken_transformer_engine_is_named_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    config = model_config()
    with pytest.raises(DependencyError, match=r"transformer_engine.pytorch cannot be imported.*pip install"):
        own.block_spec(config, cuda.transformer_engine_layers(config))


def test_the_fused_kernel_is_asked_for_the_attention_that_ours_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = types.ModuleType("torch_npu")
    kernel.npu_fusion_attention = npu_fusion_attention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", kernel)
    config = model_config(torch.float32)
    torch.manual_seed(0)
    query = torch.randn(sum(LENGTHS), HEADS, DIM)
    key, value = torch.randn(2, sum(LENGTHS), GROUPS, DIM).unbind(0)
    arguments = (config, 1, None, "self")
    results = [
        layer(*arguments).forward(query, key, value, packed_seq_params=packed_batch.pack(LENGTHS))
        for layer in (FusedAttention, own.PackedAttention)
    ]
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-5)


def test_with_sequences_shared_by_ranks_the_npu_uses_our_attention() -> None:
    config = model_config(context_parallel=2)
    assert own.PackedAttention in classes_in(own.block_spec(config, NpuPlatform().layer_replacements(config)))


def faked(value: Any, mode: FakeTensorMode) -> Any:
    """The same structure with tensors that have shapes and devices, but no numbers."""
    if isinstance(value, torch.Tensor):
        return mode.from_tensor(value)
    if isinstance(value, list):
        return [faked(part, mode) for part in value]
    if dataclasses.is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: faked(part, mode) for name, part in parts.items()})
    return value


def test_everything_that_attention_indexes_with_goes_to_the_device_with_the_micro_batch() -> None:
    """On a fake GPU: torch propagates shapes and devices, and refuses to mix them."""
    packed = packed_batch.pack(LENGTHS)
    with FakeTensorMode() as mode:
        packing = to_device(faked(packed, mode), "cuda:0")
        query = torch.empty(sum(LENGTHS), HEADS, DIM, device="cuda:0")
        key, value = torch.empty(2, sum(LENGTHS), GROUPS, DIM, device="cuda:0").unbind(0)
        attention = own.PackedAttention(model_config(torch.float32), 1, None, "self")
        out = attention(query, key, value, packed_seq_params=packing)
        assert out.device.type == packing.cu_seqlens_q.device.type == "cuda"
        assert out.shape == (sum(LENGTHS), HEADS * DIM)
        assert to_device(out, "cpu").device.type == "cpu"


def test_placing_keeps_what_is_no_tensor_and_lets_the_gradient_back() -> None:
    packing = packed_batch.pack(LENGTHS)
    placed = to_device(packing, "cpu")
    assert placed.buckets[0].gather is packing.buckets[0].gather
    assert (placed.max_seqlen_q, placed.qkv_format) == (12, "thd")
    leaf = torch.ones(2, requires_grad=True)
    (moved,), number = to_device(([leaf], 3), "cpu")
    moved.sum().backward()
    assert leaf.grad is not None and number == 3
