"""Only logits of trained positions are computed, and as few copies of them as possible are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config

from async_grpo.config.trainer import TrainerConfig
from tests.support.layer_syncs import SIZES, OnMeta
from trainer.batch.layout import lay_out_sequences
from trainer.model.builder import build_model
from trainer.model.policy import divide_in_place, to_device, vocab_parallel_entropy

TOKENS, TRAINED, VOCABULARY = 128, 72, 4096
"""More positions are trained than the hidden size (64): the weight, transposed, has as many rows as that."""


@pytest.fixture
def _two_tensor_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(CudaRNGStatesTracker, "fork", lambda self: nullcontext())  # of dropout, which is 0
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


class RowsOfLogits(TorchDispatchMode):
    """Notes the most rows of a tensor that is as wide as a rank's part of the vocabulary."""

    rows = 0

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and tensor.shape[-1] == VOCABULARY // 2:
                self.rows = max(self.rows, tensor.numel() * 2 // VOCABULARY)
        return result


@pytest.mark.usefixtures("_two_tensor_ranks")
@pytest.mark.parametrize("fp32_head", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_output_layer_multiplies_trained_positions_alone(sequence_parallel: bool, fp32_head: bool) -> None:
    hf = Qwen3Config(**SIZES, intermediate_size=96, vocab_size=VOCABULARY)
    layout = TrainerConfig(processes=2, tensor_parallel=2, sequence_parallel=sequence_parallel)
    dtype = torch.bfloat16 if fp32_head else torch.float32
    model = build_model(hf, OnMeta(), dtype, layout, fp32_head=fp32_head)
    model.rotary_pos_emb.inv_freq = model.rotary_pos_emb.inv_freq.to("meta")
    packed = replace(lay_out_sequences([TOKENS]), trained=torch.arange(TRAINED))
    placed, tokens = to_device((packed, torch.zeros(1, TOKENS, dtype=torch.int64)), "meta")
    with RowsOfLogits() as noted:
        logits = model(tokens, tokens, None, packed_seq_params=placed)
        logits.sum().backward()
    assert logits.shape == (1, TRAINED, VOCABULARY // 2)
    assert logits.dtype == torch.float32
    assert noted.rows == TRAINED
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_logits_are_divided_where_they_lie() -> None:
    leaf = torch.randn(1, 3, 5, requires_grad=True)
    logits = leaf * 2
    divided = divide_in_place(logits, 0.8)
    assert divided.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(divided, leaf * 2 / 0.8)
    (gradient,) = torch.autograd.grad((divided**2).sum(), leaf)
    torch.testing.assert_close(gradient, 8 * leaf / 0.64)


def test_the_entropy_and_its_gradient_are_those_of_the_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_group", lambda: None)
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    entropy = vocab_parallel_entropy(logits)
    expected = torch.distributions.Categorical(logits=logits).entropy()
    weights = torch.arange(4.0, dtype=torch.float64)
    torch.testing.assert_close(entropy, expected)
    found, wanted = (torch.autograd.grad((values * weights).sum(), logits)[0] for values in (entropy, expected))
    torch.testing.assert_close(found, wanted)
