"""Layers of accelerators take the places of our own: same names, same numbers, all tensors on one device."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import itertools
import shutil
import sys
import sysconfig
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
import torch.nn.functional as F
from megatron.core.extensions import transformer_engine as extension
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from async_grpo.errors import ConfigError, DependencyError
from tests.support import npu_operators
from tests.support.layer_syncs import OPERATORS
from tests.support.tolerances import assert_equal_up_to_rounding
from trainer.batch import layout
from trainer.batch.context_parallel import padded_lengths, rank_positions
from trainer.batch.layout import ContextRank
from trainer.model import layers as own
from trainer.model.policy import to_device
from trainer.platform import cuda, fused_layers, npu
from trainer.platform.base import LayerRole

HEADS, GROUPS, DIM = 4, 2, 16
LENGTHS = [5, 12, 1, 7]


Norm, Column, Row, Attention = (type(name, (), {}) for name in ("Norm", "Column", "Row", "Attention"))


@pytest.fixture
def their_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine, as far as the spec sees it."""
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
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
def test_transformer_engine_takes_every_place_that_was_ours_and_parameters_keep_their_names(device: Device) -> None:
    config = model_config(qk_layernorm=True)
    spec = own.build_block_spec(config, device(9, 0).layer_replacements(config))
    found = classes_in(spec)
    assert found >= {Norm, Column, Row, Attention}
    assert not found & {own.RMSNorm, own.PackedAttention, ColumnParallelLinear, RowParallelLinear}
    layer = spec.layer_specs[0].submodules  # norms stay beside the linear layers
    assert layer.input_layernorm is layer.pre_mlp_layernorm is Norm
    assert layer.self_attention.submodules.linear_qkv is layer.mlp.submodules.linear_fc1 is Column
    assert device(9, 0).model_options(experts=False)["apply_rope_fusion"]


Device = Callable[[int, int], cuda.CudaPlatform]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Makes the platform on a device of this compute capability."""

    def with_capability(*capability: int) -> cuda.CudaPlatform:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        return cuda.CudaPlatform()

    return with_capability


BFLOAT16, CONTEXT, FLOAT32 = (torch.bfloat16, 1), (torch.bfloat16, 2), (torch.float32, 1)


@pytest.mark.parametrize(
    ("capability", "engine", "kind", "chosen", "why"),
    [
        ((9, 0), True, BFLOAT16, "Attention", "Transformer Engine's: it has a kernel for capability 9.0"),
        ((8, 0), True, BFLOAT16, "VarlenAttention", "has no kernel of its own for capability 8.0"),
        ((12, 0), True, BFLOAT16, "VarlenAttention", "has no kernel of its own for capability 12.0"),
        ((8, 6), False, BFLOAT16, "VarlenAttention", "Transformer Engine is not installed"),
        ((9, 0), True, FLOAT32, "PackedAttention", "compute in bfloat16"),
        ((9, 0), True, CONTEXT, "VarlenAttention", "over the keys of all ranks that share the sequences"),
        ((7, 5), True, BFLOAT16, "PackedAttention", "no varlen_attn for capability 7.5"),
    ],
)
def test_a_gpu_uses_the_fastest_attention_that_it_has_and_says_why(
    their_layers: None,
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    engine: bool,
    kind: tuple[torch.dtype, int],
    chosen: str,
    why: str,
) -> None:
    """Transformer Engine 2.18 has a kernel for packed sequences from 9.0 on (fused_attn.cpp), at 12.0 by cuDNN."""
    monkeypatch.setattr(cuda, "_has_transformer_engine", lambda: engine)
    platform, config = device(*capability), model_config(*kind)
    found = own.build_block_spec(config, platform.layer_replacements(config))
    assert found.layer_specs[0].submodules.self_attention.submodules.core_attention.__name__ == chosen
    assert why in platform.attention


def test_without_the_operator_of_torch_a_gpu_uses_our_attention(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def varlen_of_torch_2_10(query: Any, key: Any, value: Any, *lengths: Any, is_causal: bool = False) -> None: ...

    monkeypatch.setattr(varlen, "varlen_attn", varlen_of_torch_2_10)
    assert LayerRole.attention not in device(9, 0).layer_replacements(model_config())


@pytest.mark.parametrize("absent", ["nothing", "triton", "compiler", "Python.h"])
def test_swiglu_is_compiled_only_where_torch_finds_what_it_needs(
    absent: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton" != absent or None)
    monkeypatch.setattr(shutil, "which", lambda name: None if absent == "compiler" else "/bin/cc")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    if absent != "Python.h":
        (tmp_path / "Python.h").touch()
    assert cuda.CudaPlatform().model_options(experts=False)["bias_activation_fusion"] is (absent == "nothing")
    assert not cuda.CudaPlatform().model_options(experts=True)["bias_activation_fusion"]


def test_the_spec_that_was_given_stays_as_it_was() -> None:
    spec = own.build_block_spec(model_config())
    own.replace_modules(spec, {own.PackedAttention: fused_layers.NpuAttention})
    assert own.PackedAttention in classes_in(spec)


def test_a_broken_transformer_engine_is_named_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(DependencyError, match=r"transformer_engine\.pytorch .*only transformer-engine"):
        cuda.CudaPlatform().model_options(experts=False)


def test_more_sequences_than_one_call_takes_are_several_calls(torch_npu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fused_layers.MAX_SEGMENTS == npu_operators.MAX_SEGMENTS
    for module in (fused_layers, npu_operators):
        monkeypatch.setattr(module, "MAX_SEGMENTS", 3)
    packed = layout.lay_out_sequences(LENGTHS)
    query, key, value = torch.randn(3, sum(LENGTHS), HEADS, DIM).unbind(0)
    arguments = (model_config(torch.float32), 1, None, "self")
    results = [
        layer(*arguments)(query, key, value, packed_seq_params=packed)
        for layer in (fused_layers.NpuAttention, own.PackedAttention)
    ]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("capability", "dtype", "old_torch", "names"),
    [
        ((9, 0), torch.float32, False, "model.precision"),
        ((7, 5), torch.bfloat16, False, "capability 8.0"),
        ((9, 0), torch.bfloat16, True, f"torch {torch.__version__}"),
    ],
)
def test_sequences_shared_by_ranks_are_refused_on_a_gpu_without_a_kernel_for_them(
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    old_torch: bool,
    names: str,
) -> None:
    monkeypatch.setattr(fused_layers, "has_varlen_attention", lambda: not old_torch)
    with pytest.raises(ConfigError, match=r"trainer\.context_parallel is 2") as refused:
        device(*capability).layer_replacements(model_config(dtype, context_parallel=2))
    assert names in str(refused.value)


def varlen_reference(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, **given: Any
) -> torch.Tensor:
    """What torch and FlashAttention document of varlen_attn; `given` must be its names."""
    assert given["window_size"] == (-1, 0)
    assert (max_q, max_k) == tuple(offsets.diff().max().item() for offsets in (cu_seq_q, cu_seq_k))
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert given["enable_gqa"] is (query.shape[1] != key.shape[1])
    queries, keys, values = (
        part.split(offsets.diff().tolist()) for part, offsets in ((query, cu_seq_q), (key, cu_seq_k), (value, cu_seq_k))
    )
    outputs = []
    for segment in zip(queries, keys, values, strict=True):
        q, k, v = (part.transpose(0, 1) for part in segment)
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        options = {"attn_mask": mask, "scale": given["scale"], "enable_gqa": given["enable_gqa"]}
        outputs.append(F.scaled_dot_product_attention(q, k, v, **options).transpose(0, 1))
    return torch.cat(outputs)


@pytest.fixture
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", npu_operators)


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("kernel", [fused_layers.NpuAttention, fused_layers.VarlenAttention])
@pytest.mark.parametrize("groups", [GROUPS, HEADS])
def test_a_fused_kernel_is_asked_for_the_attention_that_ours_computes(
    kernel: type[Any], groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", create_autospec(varlen.varlen_attn, side_effect=varlen_reference))
    config = model_config(torch.float32)
    torch.manual_seed(0)
    query = torch.randn(sum(LENGTHS), HEADS, DIM, requires_grad=True)
    key, value = (torch.randn(sum(LENGTHS), groups, DIM, requires_grad=True) for _ in range(2))
    packed = layout.lay_out_sequences(LENGTHS)
    packed.rotation = layout.Rotation.of(torch.arange(sum(LENGTHS)), torch.rand(DIM // 2), torch.float32)
    results = []
    for layer in (kernel, own.PackedAttention):
        out = layer(config, 1, None, "self").forward(query, key, value, packed_seq_params=packed)
        results.append([out, *torch.autograd.grad(out.square().sum(), (query, key, value))])
    for found, expected in zip(*results, strict=True):
        assert_equal_up_to_rounding(found, expected, terms=sum(LENGTHS) * DIM)


SHARED_KERNELS = [fused_layers.PlainAttention, fused_layers.NpuAttention, fused_layers.VarlenAttention]


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("kernel", SHARED_KERNELS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_sequences_compute_plain_attention_and_its_gradients(
    kernel: type[Any], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", varlen_reference)
    monkeypatch.setattr(fused_layers.parallel_state, "get_context_parallel_group", lambda: None)
    for module in (fused_layers, npu_operators):
        monkeypatch.setattr(module, "MAX_SEGMENTS", 3)  # several calls of the NPU's kernel
    monkeypatch.setattr(fused_layers, "QUERY_BLOCK", 3)
    lengths = padded_lengths([5, 17, 1, 30], ContextRank(ranks=ranks))
    generator = torch.Generator().manual_seed(0)
    query, key, value, towards = (
        torch.randn(sum(lengths), heads, DIM, generator=generator) for heads in (HEADS, GROUPS, GROUPS, HEADS)
    )
    given = [tensor.requires_grad_() for tensor in (query, key, value)]

    starts = [0, *itertools.accumulate(lengths)][:-1]
    places = []
    for rank in range(ranks):
        context = ContextRank(rank, ranks)
        sequences = zip(starts, lengths, strict=True)
        places.append(torch.cat([start + rank_positions(length, context) for start, length in sequences]))
    everywhere = torch.cat([torch.stack([key[place], value[place]], 1) for place in places])
    monkeypatch.setattr(fused_layers, "gather_context", lambda part, group: everywhere)
    config = model_config(torch.float32, ranks)
    found = torch.empty(sum(lengths), HEADS * DIM)
    for rank, place in enumerate(places):
        packed = layout.lay_out_sequences(lengths, ContextRank(rank, ranks))
        parts = (tensor[place] for tensor in given)
        found[place] = kernel(config, 1, None, "self")(*parts, packed_seq_params=packed)

    expected = own.PackedAttention(model_config(torch.float32), 1, None, "self")(
        *given, packed_seq_params=layout.lay_out_sequences(lengths)
    )
    terms = sum(lengths) * DIM
    assert_equal_up_to_rounding(found, expected, terms=terms)
    gradients = [
        torch.autograd.grad((out * towards.flatten(1)).sum(), given, retain_graph=True) for out in (found, expected)
    ]
    for mine, theirs in zip(*gradients, strict=True):
        assert_equal_up_to_rounding(mine, theirs, terms=terms)


class LargestTensor(TorchDispatchMode):
    """Notes the elements of the largest tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


@pytest.mark.parametrize("kernel", SHARED_KERNELS)
def test_sharing_a_sequence_makes_no_tensor_of_its_length_squared(
    kernel: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    length, ranks = 8192, 2
    monkeypatch.setitem(sys.modules, "torch_npu", OPERATORS)  # type: ignore[arg-type]
    monkeypatch.setattr(varlen, "varlen_attn", lambda *given, **_: OPERATORS.npu_fusion_attention(*given)[0])
    monkeypatch.setattr(fused_layers.parallel_state, "get_context_parallel_group", lambda: None)
    monkeypatch.setattr(fused_layers, "gather_context", lambda part, group: torch.cat([part] * ranks))
    query, key, value = torch.zeros(3, length // ranks, 1, DIM, requires_grad=True).unbind(0)
    with LargestTensor() as largest:
        packed = layout.lay_out_sequences([length], ContextRank(1, ranks))
        layer = kernel(model_config(torch.float32, ranks), 1, None, "self")
        layer(query, key, value, packed_seq_params=packed).sum().backward()
    assert largest.elements <= 512 * length


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-6)])
def test_the_npus_rotation_is_ours(dtype: torch.dtype, digits: float) -> None:
    angles = torch.arange(25), torch.rand(DIM // 2), dtype
    heads = torch.randn(25, HEADS, DIM).to(dtype)
    found, expected = (kind.of(*angles)(heads) for kind in (fused_layers.NpuRotation, layout.Rotation))
    torch.testing.assert_close(found, expected, atol=digits, rtol=digits)


@pytest.mark.parametrize("context_parallel", [1, 2])
def test_the_npu_has_fused_layers_also_where_ranks_share_sequences(
    context_parallel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npu, "import_package", lambda *_: types.SimpleNamespace(PTNorm=Norm))
    config, platform = model_config(context_parallel=context_parallel), npu.NpuPlatform()
    layers = platform.layer_replacements(config)
    assert {fused_layers.NpuAttention, Norm} <= classes_in(own.build_block_spec(config, layers))
    assert layers[LayerRole.rotation] is fused_layers.NpuRotation
    assert [platform.model_options(experts=each)["bias_activation_fusion"] for each in (False, True)] == [True, False]


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


def test_everything_that_attention_indexes_with_goes_to_the_device_with_the_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a fake GPU: torch propagates shapes and devices, and refuses to mix them."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    packed = layout.lay_out_sequences(LENGTHS)
    with FakeTensorMode() as mode:
        packing = to_device(faked(packed, mode), "cuda:0")
        assert len(pinned) == 5  # else the host would wait for all work before each copy
        query = torch.empty(sum(LENGTHS), HEADS, DIM, device="cuda:0")
        key, value = torch.empty(2, sum(LENGTHS), GROUPS, DIM, device="cuda:0").unbind(0)
        attention = own.PackedAttention(model_config(torch.float32), 1, None, "self")
        out = attention(query, key, value, packed_seq_params=packing)
        assert out.device.type == packing.cu_seqlens_q.device.type == "cuda"
        assert out.shape == (sum(LENGTHS), HEADS * DIM)
        assert to_device(out, "cpu").device.type == "cpu"


def test_placing_keeps_what_is_no_tensor_and_lets_the_gradient_back() -> None:
    packing = layout.lay_out_sequences(LENGTHS)
    placed = to_device(packing, "cpu")
    assert placed.cells is not None and packing.cells is not None
    assert placed.cells.token_of_cell is packing.cells.token_of_cell
    assert (placed.max_seqlen_q, placed.qkv_format, placed.ends) == (12, "thd", [5, 17, 18, 25])
    leaf = torch.ones(2, requires_grad=True)
    (moved,), number = to_device(([leaf], 3), "cpu")
    moved.sum().backward()
    assert leaf.grad is not None and number == 3
