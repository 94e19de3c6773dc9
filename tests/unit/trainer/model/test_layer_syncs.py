"""No layer makes the host wait for its device, in the forward and in the backward pass, on any platform."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils
from transformers import Qwen3MoeConfig

from async_grpo.config.trainer import TrainerConfig
from tests.support.layer_syncs import LENGTHS, OPERATORS, SIZES, Copies, OnMeta, syncs
from trainer.batch.layout import ContextRank, lay_out_sequences
from trainer.model import layers
from trainer.model.builder import build_model
from trainer.model.policy import to_device
from trainer.platform import Platform, fused_layers, npu
from trainer.platform.cuda import CudaPlatform


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):  # of the host, before an activation is recomputed
        monkeypatch.setattr(f"megatron.core.tensor_parallel.random.{name}", lambda *_, **__: None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def ascend(monkeypatch: pytest.MonkeyPatch) -> Platform:
    """The NPU platform over operators that have the shapes of torch_npu's."""
    monkeypatch.setitem(sys.modules, "torch_npu", OPERATORS)  # type: ignore[arg-type]
    monkeypatch.setattr(npu, "import_package", lambda *_: types.SimpleNamespace(PTNorm=layers.RMSNorm))
    swiglu = types.SimpleNamespace(apply=lambda x, *_: x.chunk(2, -1)[0] * x.chunk(2, -1)[1])
    monkeypatch.setattr("megatron.core.fusions.fused_bias_swiglu.SwiGLUFunction", swiglu)  # as MindSpeed does
    return npu.NpuPlatform()


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_own_layers_never_wait(dtype: torch.dtype, recompute: str) -> None:
    assert syncs(OnMeta(), dtype, recompute=recompute) == 0


def test_a_gpu_without_transformer_engine_never_waits() -> None:
    """The real `varlen_attn` runs, by the shapes that torch registers for it."""
    platform = CudaPlatform()
    assert syncs(platform) == 0
    assert "varlen_attn" in platform.attention


def test_an_npu_never_waits(ascend: Platform) -> None:
    assert syncs(ascend) == 0
    assert "npu_fusion_attention" in ascend.attention


@pytest.mark.parametrize("kernel", [fused_layers.VarlenAttention, fused_layers.NpuAttention])
def test_ranks_that_share_sequences_never_wait(kernel: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", OPERATORS)  # type: ignore[arg-type]
    monkeypatch.setattr(fused_layers, "gather_context", lambda part, group: torch.cat([part, part]))
    attention = kernel(types.SimpleNamespace(kv_channels=16), 1, None, "self")
    packed = to_device(lay_out_sequences(LENGTHS, ContextRank(0, 2)), "meta")
    query = torch.empty(sum(LENGTHS) // 2, 4, 16, device="meta", requires_grad=True)
    with Copies() as copies:
        attention(query, query, query, packed_seq_params=packed).sum().backward()
    assert copies.count == 0


def test_the_router_of_experts_works_without_transformer_engine_on_every_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the CPU platform gave the name that Megatron's router asks for."""
    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", MagicMock())
    hf = Qwen3MoeConfig(**SIZES, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, vocab_size=50)
    model = build_model(hf, OnMeta(CudaPlatform()), torch.bfloat16, TrainerConfig())
    hidden = torch.empty(7, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    logits = model.decoder.layers[0].mlp.router.gating(hidden)
    logits.sum().backward()
    assert (logits.shape, logits.dtype) == ((7, 4), torch.float32)
