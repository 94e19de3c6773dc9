"""FLOPs of a model, compared with counts by hand and by torch."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from async_grpo.models.shapes import shape_of

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
LENGTH = 50


@pytest.mark.parametrize("config", [Qwen2Config(**SIZES), Qwen3Config(**SIZES, head_dim=16)], ids=["qwen2", "qwen3"])
def test_a_dense_model_is_counted_as_torch_counts_it(config: PretrainedConfig) -> None:
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, LENGTH, dtype=torch.int64))
    shape = shape_of(config)
    full_mask = 2 * shape.layers * shape.query * LENGTH**2  # torch multiplies masked scores, too: twice the causal ones
    embedding_rotations = LENGTH * shape.head_dim  # of the rotary angles, a small matrix product
    assert counter.get_total_flops() == pytest.approx(
        shape.forward_flops([LENGTH]) + full_mask, abs=2 * embedding_rotations
    )


def test_only_the_experts_of_a_token_count() -> None:
    config = Qwen3MoeConfig(**SIZES, **EXPERTS)
    attention = 32 * (2 * 4 * 16 + 2 * 2 * 16)
    layer = attention + 32 * 8 + 2 * 3 * 32 * 24
    assert shape_of(config).matrix_weights == 3 * layer + 32 * 96


def test_a_long_sequence_costs_more_than_two_of_half_its_length() -> None:
    shape, width = shape_of(Qwen2Config(**SIZES)), 3 * 4 * 8
    assert shape.forward_flops([100]) == shape.forward_flops([50, 50]) + 2 * width * (100**2 - 2 * 50**2)
    assert shape.attention_cost == width / shape.matrix_weights
