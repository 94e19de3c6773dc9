"""A model that the trainer would build wrongly is refused by name, before anything is built."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import GemmaConfig, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from async_grpo.app.launch.first_policy import prepare_model
from async_grpo.config import validate
from async_grpo.config.model import LoraConfig
from async_grpo.config.trainer import TrainerConfig
from async_grpo.errors import ConfigError
from trainer.model.checks import check_architecture, check_lora
from trainer.model.families import read_rope
from trainer.model.weight_map import find_parameter_name, model_tensors, stage_weights

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
SMALL: dict[str, Any] = {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4}


def layout(ranks: int = 8, **keys: Any) -> TrainerConfig:
    return TrainerConfig(processes=ranks, **keys)


def refusal(hf: PretrainedConfig, trainer: TrainerConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        check_architecture(hf, trainer)
    return str(caught.value)


@pytest.mark.parametrize(
    ("hf", "named"),
    [
        (GemmaConfig(), "model_type 'gemma'"),
        (Qwen2Config(hidden_act="gelu"), "hidden_act 'gelu'"),
        (Qwen2Config(use_sliding_window=True, max_window_layers=0), "use_sliding_window True"),
        (Qwen2Config(rope_parameters=YARN), "rope_type 'yarn'"),
        (Qwen3Config(rope_parameters=LLAMA3), "rope_type 'llama3'"),
        (Qwen3Config(attention_bias=True), "attention_bias True"),
        (LlamaConfig(mlp_bias=True), "mlp_bias True"),
        (LlamaConfig(rope_parameters={**LLAMA3, "high_freq_factor": 8.0}), "high_freq_factor 8.0"),
        (Qwen3MoeConfig(decoder_sparse_step=2), "decoder_sparse_step 2"),
        (Qwen3MoeConfig(mlp_only_layers=[0]), "mlp_only_layers [0]"),
        (Qwen3MoeConfig(num_experts_per_tok=1, norm_topk_prob=True), "num_experts_per_tok 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_built_is_refused_by_name(hf: PretrainedConfig, named: str) -> None:
    assert named in refusal(hf, TrainerConfig())


DENSE = Qwen3Config(**SMALL)
EXPERTS = Qwen3MoeConfig(**SMALL, num_experts=12)


@pytest.mark.parametrize(
    ("hf", "keys", "named"),
    [
        (DENSE, {"tensor_parallel": 8}, "num_key_value_heads (4) is not a multiple of trainer.tensor_parallel (8)"),
        (DENSE, {"pipeline_parallel": 4}, "num_hidden_layers (6) is not a multiple of trainer.pipeline_parallel (4)"),
        (DENSE, {"expert_parallel": 2}, "qwen3 has no experts"),
        (EXPERTS, {"expert_parallel": 8}, "num_experts (12) is not a multiple of trainer.expert_parallel (8)"),
        (EXPERTS, {"tensor_parallel": 2}, "Set trainer.sequence_parallel to true"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused(
    hf: PretrainedConfig, keys: dict[str, int], named: str
) -> None:
    assert named in refusal(hf, layout(**keys))


def test_a_run_refuses_it_before_it_starts_anything(tmp_path: Path) -> None:
    EXPERTS.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").touch()
    save_file({"a": np.zeros(1)}, tmp_path / "model.safetensors")
    raw = {"name": "a", "model": {"path": str(tmp_path)}, "trainer": {"processes": 2, "tensor_parallel": 2}}
    with pytest.raises(ConfigError, match="sequence_parallel to true"):
        asyncio.run(prepare_model(validate(raw, "test"), print))


def test_experts_have_no_dense_layers_to_divide() -> None:
    hf = Qwen3MoeConfig(**SMALL, num_experts=12, intermediate_size=33)
    check_architecture(hf, layout(tensor_parallel=2, sequence_parallel=True, expert_parallel=4))


def test_the_scaling_of_llama_3_is_taken_from_the_configuration() -> None:
    hf = LlamaConfig(rope_parameters=LLAMA3)
    check_architecture(hf, TrainerConfig())
    assert (read_rope(hf).theta, read_rope(hf).factor) == (500000.0, 32.0)
    assert read_rope(Qwen3Config(rope_parameters={"rope_type": "default", "rope_theta": 1e6})).factor is None


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_tensor_is_exported_once_in_every_layout(stages: int, ranks: int) -> None:
    hf = Qwen3MoeConfig(**SMALL, num_experts=12, tie_word_embeddings=True)
    exported = [
        name
        for stage in range(stages)
        for weight in stage_weights(hf, stage, stages, ranks)
        if weight.exported
        for name in weight.hf
    ]
    assert exported == [name for name, _ in model_tensors(hf, stages)]
    assert sorted(exported) == sorted({name for name, _ in model_tensors(hf, 1)})


def test_each_expert_parallel_rank_numbers_its_experts_from_zero() -> None:
    weights = stage_weights(EXPERTS, 0, 6, 4)
    second = [weight for weight in weights if weight.expert_rank == 1 and weight.megatron.endswith("linear_fc2.weight")]
    assert [weight.megatron.split(".")[6] for weight in second] == ["0", "1", "2"]
    assert [weight.hf[0].split(".")[5] for weight in second] == ["3", "4", "5"]


@pytest.mark.parametrize(
    ("ours", "fused"),
    [
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ("mlp.experts.local_experts.3.linear_fc1.weight", "mlp.experts.linear_fc1.weight3"),
    ],
)
def test_a_parameter_is_found_by_either_of_its_names(ours: str, fused: str) -> None:
    ours, fused = f"decoder.layers.1.{ours}", f"decoder.layers.1.{fused}"
    assert find_parameter_name(ours, {ours}) == ours
    assert find_parameter_name(ours, {fused}) == fused
    with pytest.raises(KeyError):
        find_parameter_name(ours, {"decoder.layers.1.other"})


@pytest.mark.parametrize(
    ("hf", "lora", "named"),
    [
        (Qwen2Config(hidden_size=64), {"rank": 64}, "model.lora.rank below 64"),
        (Qwen3MoeConfig(), {}, "Set model.lora.targets to [q_proj, k_proj, v_proj, o_proj]"),
    ],
)
def test_adapters_that_the_model_cannot_have_are_refused(
    hf: PretrainedConfig, lora: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_lora(hf, LoraConfig(**lora))
    assert named in str(caught.value)
