"""Counts what makes the host wait for its device in one pass of a model, forward and backward.

    python -m tests.support.layer_syncs MINDSPEED     the same under MindSpeed's patches: prints the counts as JSON

The whole model is on torch's `meta` device, whose tensors have no numbers. Whatever needs one there (`item`, `tolist`,
`bool`, `nonzero`, `equal`, a mask as an index, a copy to the CPU) raises, and copies between devices are counted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from async_grpo.config.trainer import TrainerConfig
from trainer.platform.base import LayerRole, Platform

LENGTHS = [8, 12, 4, 40]
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


class Copies(TorchDispatchMode):
    """Counts the operators that see tensors of two devices: copies from one to the other."""

    count = 0

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
        self.count += len({tensor.device for tensor in tensors}) > 1
        return result


OPERATORS = SimpleNamespace(
    npu_fusion_attention=lambda query, key, value, *_, **__: (query + key.mean() + value.mean(),),
    npu_rotary_mul=lambda heads, cos, sin: heads * cos + heads * sin,
)
"""Of torch_npu, as far as shapes go."""


class OnMeta(Platform):
    """A platform whose device computes nothing; its layers are those of `like`, or the CPU's."""

    name = device = "meta"

    def __init__(self, like: Platform | None = None) -> None:
        self._like = like

    def model_options(self, *, experts: bool) -> Mapping[str, Any]:
        options = self._like.model_options(experts=experts) if self._like else {}
        return {**options, "perform_initialization": False}

    def layer_replacements(self, config: Any) -> Mapping[LayerRole, type]:
        return self._like.layer_replacements(config) if self._like else {}


def syncs(platform: Platform, dtype: torch.dtype = torch.bfloat16, **layout: Any) -> int:
    """Copies between devices in one forward and backward pass; anything else that would wait raises."""
    from transformers import Qwen3Config

    from trainer.batch.layout import lay_out_sequences
    from trainer.model.builder import build_model
    from trainer.model.policy import to_device

    hf = Qwen3Config(**SIZES, intermediate_size=96, vocab_size=50)
    model = build_model(hf, OnMeta(platform), dtype, TrainerConfig(**layout)).to(dtype)  # as Float16Module does
    model.rotary_pos_emb.inv_freq = model.rotary_pos_emb.inv_freq.to("meta")
    packed = replace(lay_out_sequences(LENGTHS), trained=torch.tensor([1, 3, 9]))
    tokens = torch.zeros(1, sum(LENGTHS), dtype=torch.int64)
    placed, tokens = to_device((packed, tokens), "meta")
    with Copies() as copies:
        model(tokens, tokens, None, packed_seq_params=placed).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return copies.count


def _under_mindspeed(source: Path) -> dict[str, int]:
    """The counts of the NPU platform, by what is recomputed."""
    from tests.support.mindspeed import NpuOnCpu

    platform = NpuOnCpu(source)
    platform.activate(TrainerConfig())
    from megatron.core import parallel_state, tensor_parallel

    sys.modules["torch_npu"].npu_fusion_attention = OPERATORS.npu_fusion_attention  # type: ignore[attr-defined]
    torch.Tensor.pin_memory = lambda self: self  # type: ignore[assignment, method-assign]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return {kept: syncs(platform, recompute=kept) for kept in ("none", "selective", "full")}


if __name__ == "__main__":
    print(json.dumps(_under_mindspeed(Path(sys.argv[1]))))
